"""Low-rank adapters: what is trained, that it equals a single process, and that PEFT computes the same."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hugging_face import SEQ_LEN, VOCAB, make_model, require_transformers, save, wide
from safetensors.torch import load_file
from small_run import small_run
from thinned import thinned

from pipeloom.checkpoint.checkpoint_folder import find_checkpoint, read_info
from pipeloom.cli import main
from pipeloom.cli.export import _kind
from pipeloom.config import AdapterConfig, CheckpointConfig, ModelConfig, OptimizerConfig, TrainingConfig
from pipeloom.errors import UserError
from pipeloom.model import build_stage
from pipeloom.predict.describe import completed, with_model_sizes
from pipeloom.training.checkpoints.contents import expected_shapes
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.training.conversions.export import export_weights
from pipeloom.training.equivalence import verify_gradients
from pipeloom.training.run import train
from pipeloom.training.stages import stage_of
from pipeloom.workload.adapter import Adapter, is_pair
from pipeloom.workload.layout import Layout

EVERY = ("q", "k", "v", "o", "gate", "up", "down")
TRAINING = TrainingConfig(
    steps=2, validation_batches=0, sample_tokens=0, predict=False, dtype="float64", stall_timeout_s=20
)


def tuned(folder, pretrained, layout, adapter, **training):
    """A run that starts from a folder and trains adapters quickly, so that they change the logits."""
    config = small_run(
        folder,
        model=ModelConfig(file=pretrained),
        layout=layout,
        training=replace(TRAINING, **training),
        optimizer=OptimizerConfig(lr=0.1, lr_warmup_steps=0),
        adapter=adapter,
        checkpoint=CheckpointConfig(final="checkpoint", init=pretrained),
    )
    config, problems = with_model_sizes(replace(config, data=replace(config.data, seq_len=SEQ_LEN, tokenizer="bytes")))
    assert not problems
    return config


@pytest.mark.parametrize(
    ("layout", "changes"),
    thinned(
        [
            (Layout(pp=2, tp=2, loops=1, sequence_parallel=True), {}),
            (Layout(pp=2, tp=2, loops=2, recompute="full"), {"freeze_layers": 1}),
            (Layout(pp=2, dp=2, loops=3, shard="full", partition=(1, 1, 1, 1, 1, 1)), {}),
            (Layout(pp=1, cp=2, loops=2, shard="full"), {}),
        ],
        2,
    ),
)
@pytest.mark.timeout(120)
def test_gradients_equal_one_process_and_only_pairs_have_some(tmp_path, layout, changes):
    layout = replace(layout, num_microbatches=4, microbatch_size=1)
    config = small_run(
        tmp_path,
        model=ModelConfig(num_layers=4, hidden_size=16, num_heads=4, tied=layout.dp == 1),
        layout=layout,
        adapter=AdapterConfig(rank=3, targets=EVERY),
        training=replace(TRAINING, **changes),
    )
    found = verify_gradients(config, num_batches=1, quiet=True)
    assert max(found.differences.values()) < 1e-9
    names = found.differences.keys() - {"loss", "gradient norm"}
    assert len(names) == 2 * len(EVERY) * (4 - changes.get("freeze_layers", 0))
    assert all(map(is_pair, names))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = make_model("llama", torch.float64)
    return model, save(model, tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def run(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    layout = Layout(pp=2, tp=2, loops=1, num_microbatches=2, microbatch_size=1)
    adapter = AdapterConfig(rank=4, targets=("q", "v", "gate", "down"), alpha=6.0)
    config = tuned(folder, llama[1], layout, adapter, freeze_layers=1)
    train(config, quiet=True)
    return config


def test_a_checkpoint_has_state_of_pairs_only_and_the_weights_of_the_folder(run, llama):
    checkpoint = find_checkpoint(run.output.folder)
    keys = CheckpointReader(checkpoint).read_metadata().state_dict_metadata.keys()
    state = {key for key in keys if key.startswith("optimizer.")}
    pairs = {key for key in keys if key.startswith("model.") and is_pair(key)}
    assert len(pairs) == 2 * 4 * 3  # layers 1 to 3
    assert state == {
        f"optimizer.{kind}.{key.removeprefix('model.')}" for key in pairs for kind in ("exp_avg", "exp_avg_sq")
    }
    info = read_info(checkpoint)
    assert info.base == str(llama[1])
    own = Adapter(rank=4, alpha=6.0, targets=("q", "v", "gate", "down"), first_layer=1)
    assert Adapter(**{**info.adapter, "targets": tuple(info.adapter["targets"])}) == own
    merged = export_weights(run.output.folder, run.output.folder.parent / "own")
    weights, model = load_file(merged[0]), llama[0]
    frozen = model.state_dict()["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(weights["layers.1.attention.query.weight"], frozen)
    assert weights["layers.1.attention.query.adapter.lora_B.weight"].abs().max() > 0


def logits_of(run, tokens, folder):
    """Of the run's own files."""
    export_weights(run.output.folder, folder / "own")
    own = load_file(folder / "own" / "model.safetensors")
    config = replace(run, model=run.model.resolve(VOCAB))
    stage = stage_of(config, range(config.model.num_layers + 2), "cpu")
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(own[name])
        return stage.eval()(tokens)[0]


def logits_of_exports(run, tokens, folder, base):
    """Of the merged folder in transformers, and of that of PEFT over the base where PEFT is installed."""
    transformers = require_transformers()
    export_weights(run.output.folder, folder / "merged", format="hf", merge=True)
    export_weights(run.output.folder, folder / "peft", format="hf")
    assert not list((folder / "peft").glob("model*.safetensors"))
    with torch.no_grad(), wide():
        models = [
            transformers.AutoModelForCausalLM.from_pretrained(one, dtype=torch.float64)
            for one in (folder / "merged", base)
        ]
        for model in models:
            if "experts" in "".join(name for name, _ in model.named_parameters()):
                model.set_experts_implementation("eager")  # the others do not compute in float64
        found = {"merged": models[0](tokens).logits[0]}
        if find_spec("peft") is not None:
            from peft import PeftModel

            adapted = PeftModel.from_pretrained(models[1], folder / "peft", autocast_adapter_dtype=False)
            found["peft"] = adapted.eval()(tokens).logits[0]
    return found


TOKENS = torch.randint(VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft with transformers 5
def test_merged_weights_and_the_folder_of_peft_give_the_logits_of_the_run(run, llama, tmp_path):
    expected, found = logits_of(run, TOKENS, tmp_path), logits_of_exports(run, TOKENS, tmp_path, llama[1])
    with torch.no_grad():
        before = llama[0](TOKENS).logits[0]
    assert (before - expected).abs().max() > 1e-3
    for name, logits in found.items():
        assert (logits - expected).abs().max() < 1e-10, name
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert _kind(tmp_path / "peft" / "adapter_config.json") == "adapter   "
    assert settings["layers_to_transform"] == [1, 2, 3]
    assert sorted(settings["target_modules"]) == ["down_proj", "gate_proj", "q_proj", "v_proj"]
    assert settings["base_model_name_or_path"] == str(llama[1])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", thinned(["mixtral", "qwen3_moe"], 1))
@pytest.mark.timeout(120)
def test_attention_beside_experts_has_pairs_that_go_on_with_other_ranks_and_that_peft_reads(tmp_path, family):
    """Experts that two ranks share, then one rank with all of them: routers and experts keep their values."""
    base = save(make_model(family, torch.float64), tmp_path / "base")
    layout = Layout(pp=1, dp=2, ep=2, shard="full", loops=2, num_microbatches=2, microbatch_size=1)
    pairs = AdapterConfig(rank=4, targets=("q", "v", "o"))
    config = tuned(tmp_path, base, layout, pairs)
    train(config, quiet=True)
    alone = replace(
        config,
        layout=Layout(pp=1, loops=1, num_microbatches=4, microbatch_size=1),
        training=replace(config.training, steps=4),
        checkpoint=CheckpointConfig(final="checkpoint", resume=config.output.folder),
        output=replace(config.output, folder=tmp_path / "alone"),
    )
    train(alone, quiet=True)
    expected, found = logits_of(alone, TOKENS, tmp_path), logits_of_exports(alone, TOKENS, tmp_path, base)
    for name, logits in found.items():
        assert (logits - expected).abs().max() < 1e-10, name
    first, second = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "o_proj"}


def test_adapters_that_peft_cannot_have_are_merged(tmp_path):
    model = make_model("gpt2", torch.float64)
    folder = save(model, tmp_path / "gpt2")
    layout = Layout(pp=1, loops=1, num_microbatches=2, microbatch_size=1)
    config = tuned(tmp_path, folder, layout, AdapterConfig(rank=2, targets=("q",)))
    train(config, quiet=True)
    with pytest.raises(UserError, match=r"the matrix of target q is joined with others.*--merge"):
        export_weights(config.output.folder, tmp_path / "out", format="hf")
    assert not (tmp_path / "out").exists()
    export_weights(config.output.folder, tmp_path / "out", format="hf", merge=True)
    found, base = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    name = next(name for name in base if name.endswith("h.1.attn.c_attn.weight"))
    changed = (found[name] != base[name]).any(dim=0)
    assert changed[:16].all()  # the columns of queries
    assert not changed[16:].any()


def test_evaluate_generate_and_a_second_run_take_the_adapters(run, tmp_path, capsys):
    text, cache = str(run.data.path), str(tmp_path / "cache")
    words = ["evaluate", str(run.output.folder), "--layout.pp", "1", "--layout.tp", "1", "--data.cache", cache]
    assert main([*words, "--data.path", text, "--json", "--batches", "9"]) == 0
    generate = ["generate", str(run.output.folder), "--prompt", "line", "--max-tokens", "2", "--layout.pp", "1"]
    assert main([*generate, "--layout.tp", "1"]) == 0
    capsys.readouterr()
    again = replace(
        run,
        output=replace(run.output, folder=tmp_path / "again"),
        checkpoint=CheckpointConfig(final="none", init=run.output.folder),
        layout=Layout(pp=1, loops=1, num_microbatches=2, microbatch_size=1),
        training=replace(run.training, steps=1),
    )
    train(again, quiet=True)
    other = replace(
        again, adapter=replace(again.adapter, alpha=3.0), output=replace(again.output, folder=tmp_path / "x")
    )
    with pytest.raises(UserError, match=r"adapter.alpha is 3.0, the checkpoint has 6.0"):
        train(other, quiet=True)


def test_first_values_are_those_of_peft_for_every_layout(tmp_path):
    config = ModelConfig(num_layers=2, hidden_size=64, num_heads=4).resolve(257)
    sizes = {"max_positions": 8, "seed": 1, "dtype": torch.float64, "device": "cpu"}
    adapter = Adapter(rank=8, alpha=8.0, targets=("q", "down"))
    plain = build_stage(config, range(4), **sizes)
    stage = build_stage(config, range(4), adapter=adapter, **sizes)
    named = dict(stage.named_parameters())
    first = named["layers.1.feed_forward.down.adapter.lora_A.weight"]
    bound = first.shape[1] ** -0.5  # kaiming_uniform_(a=sqrt(5))
    assert bound * 0.99 < first.abs().max() <= bound
    assert not named["layers.1.feed_forward.down.adapter.lora_B.weight"].any()
    tokens = torch.randint(257, (1, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(stage(tokens), plain(tokens))
    assert all(torch.equal(named[name], one) for name, one in plain.named_parameters())


def test_expected_tensors_of_a_run_have_state_of_pairs_only(tmp_path):
    config, problems = completed(small_run(tmp_path, adapter=AdapterConfig(rank=2)), lambda *_, **__: [])
    assert not problems
    config = replace(config, model=config.model.resolve(257))
    state = [key for key in expected_shapes(config) if key.startswith("optimizer.")]
    assert len(state) == 2 * 2 * 2 * config.model.num_layers
    assert all(map(is_pair, state))
