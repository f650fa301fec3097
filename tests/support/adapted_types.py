"""Small models of transformers' own types, trained as adapted pieces, and their gradients beside those of the whole."""

import inspect

import torch
from hugging_face import require_transformers
from in_process import Post, run_in_process
from torch.nn import functional
from toy import make_executor

from pipeloom.catalog.adapted import adapted_text
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.families import make_schedule
from pipeloom.model.adapted import AdaptedStage, adapted_stage
from pipeloom.passes import lower

VOCAB, LENGTH, NUM_LAYERS = 99, 8, 4
PARTS = (range(2), range(2, 3), range(3, 5), range(5, 6))
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "moe_intermediate_size": 24,
    "vocab_size": VOCAB,
    "head_dim": 8,
    "rotary_dim": 4,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}


def small_config(kind, **settings):
    """A small configuration of a ``model_type``, without dropout."""
    transformers = require_transformers()
    usual = transformers.CONFIG_MAPPING[kind]()
    names = {*usual.to_dict(), *usual.attribute_map}
    given = {key: one for key, one in _SIZES.items() if key in names and key not in usual.attribute_map}
    given |= {
        key: 0.0
        for key, one in usual.to_dict().items()
        if ("drop" in key or key == "layerdrop") and isinstance(one, float)
    }
    if "layer_types" in names:
        given["layer_types"] = (usual.layer_types or ["full_attention"])[:NUM_LAYERS]
    if getattr(usual, "attention_types", None):
        given["attention_types"] = [[["global", "local"], NUM_LAYERS // 2]]
    taken = inspect.signature(type(usual)).parameters
    return type(usual)(**given, **settings) if taken else usual


def text_of(config):
    """Its ``config.json`` in one line."""
    return adapted_text({**config.to_dict(), "model_type": config.model_type})


def make_adapted(kind, **settings):
    """A model of transformers with random weights, in float64, and its ``config.json``."""
    transformers = require_transformers()
    torch.manual_seed(0)
    config = small_config(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model, text_of(config)


def filled_stages(model, text, parts=PARTS):
    """Its stages, with its weights; one of them recomputes its layers."""
    stages = [adapted_stage(text, part, seed=0, dtype=torch.float64, device="cpu") for part in parts]
    whole = dict(model.named_parameters(remove_duplicate=False))
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            parameter.data.copy_(whole[name].data)
        if stage.borrows:
            stage.borrow(model.get_input_embeddings().weight.detach().clone().requires_grad_())
    stages[1].set_recompute(["full"] * NUM_LAYERS)
    return stages


def largest_difference(kind):
    """Of a gradient of the pieces, on two pipeline ranks with two loops, to its largest element in the whole model."""
    model, text = make_adapted(kind)
    stages = filled_stages(model, text)
    tokens, targets = ([torch.randint(0, VOCAB, (2, LENGTH)) for _ in range(4)] for _ in range(2))
    between = TensorSpec((2, LENGTH, model.config.get_text_config().hidden_size), torch.float64)
    specs = [between, between, between, TensorSpec((2, LENGTH, VOCAB), torch.float64)]
    schedule = lower(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=4))

    def loss(logits, microbatch):
        return functional.cross_entropy(logits.flatten(0, 1), targets[microbatch].flatten())

    post = Post()
    run_in_process(
        [make_executor(schedule, rank, stages, specs, post.transport(rank)) for rank in range(2)], tokens, loss
    )
    for microbatch, one in enumerate(tokens):
        loss(model(input_ids=one, use_cache=False).logits, microbatch).backward()
    found = _gradients(stages)
    expected = {name: one.grad for name, one in model.named_parameters()}
    assert found.keys() == expected.keys()
    return max(_difference(found[name], one) for name, one in expected.items())


def _gradients(stages: list[AdaptedStage]):
    found = {name: one.grad for stage in stages for name, one in stage.model.named_parameters()}
    if stages[-1].borrows:
        found[stages[0].tied_name.removeprefix("model.")] += stages[-1].borrowed.grad
    return found


def _difference(found, expected):
    if expected is None or not expected.any():
        return 0.0 if found is None or not found.any() else float("inf")
    assert found is not None
    assert torch.isfinite(found).all()
    return float((found - expected).abs().max() / expected.abs().max())
