"""The configuration: documented, sound by default, and judged as a whole."""

import ast
import inspect
import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import get_type_hints

import pytest

from pipeloom.config import RunConfig, find_problems, run, sections, to_dict
from pipeloom.errors import CallError
from pipeloom.workload import layout as layout_module
from pipeloom.workload.optimizers import OPTIMIZERS, Matrices

SECTIONS = get_type_hints(RunConfig)


def class_trees():
    for module in (sections, run, layout_module):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef) and is_dataclass(getattr(module, node.name)):
                yield getattr(module, node.name), node


def changed(**values):
    """A configuration with some values changed, given as ``section__key``."""
    config = RunConfig()
    for name, value in values.items():
        section, key = name.split("__")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


def test_every_setting_has_its_documentation_below_it():
    undocumented = []
    for config_class, tree in class_trees():
        assert ast.get_docstring(tree), config_class
        for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign):
                continue
            is_section = is_dataclass(get_type_hints(config_class)[node.target.id])  # its class has the documentation
            is_text = (
                isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
                and following.value.value.endswith(".")
            )
            if not is_text and not is_section:
                undocumented.append(f"{config_class.__name__}.{node.target.id}")
    assert undocumented == []


def test_every_annotated_name_is_a_field_and_every_class_attribute_is_annotated():
    number = 0
    for config_class, tree in class_trees():
        annotated = [node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)]
        assert annotated == [item.name for item in fields(config_class)]
        assert not [node for node in tree.body if isinstance(node, ast.Assign)]
        number += len(annotated)
    assert number > 40


def test_none_has_a_stated_meaning_wherever_it_is_allowed():
    for config_class, tree in class_trees():
        hints = get_type_hints(config_class)
        for node, following in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and type(None) in getattr(hints[node.target.id], "__args__", ()):
                assert "None" in following.value.value, f"{config_class.__name__}.{node.target.id}"


def test_the_default_run_has_no_problems():
    assert find_problems(RunConfig()) == []


def test_sections_are_frozen_and_take_keywords_only():
    config = RunConfig()
    with pytest.raises(AttributeError):
        config.layout.pp = 2
    with pytest.raises(TypeError):
        SECTIONS["layout"](2)


def test_the_layout_multiplies_its_axes():
    layout = changed(layout__pp=3, layout__loops=2, layout__num_microbatches=5, layout__microbatch_size=7).layout
    assert (layout.num_stages, layout.num_ranks, layout.batch_size) == (6, 3, 35)


TOO_SMALL = {
    "model__num_layers": 0,
    "model__hidden_size": 0,
    "model__num_heads": 0,
    "model__num_kv_heads": 0,
    "model__ffn_size": 0,
    "model__vocab_size": 1,
    "data__bpe_vocab_size": 256,
    "data__seq_len": 0,
    "layout__microbatch_size": 0,
    "schedule__receive_buffers": 0,
    "optimizer__lr": 0.0,
    "optimizer__eps": 0.0,
    "model__norm_eps": 0.0,
    "model__rope_theta": -0.0,
    "optimizer__lr_warmup_steps": -1,
    "optimizer__weight_decay": -0.1,
    "optimizer__clip_grad_norm": 0.0,
    "training__steps": 0,
    "training__threads": 0,
    "training__validation_batches": -1,
    "training__sample_tokens": -1,
    "training__stall_timeout_s": 0.5,
    "output__trace_step": 0,
    "training__run_ahead": 0,
    "checkpoint__every": 0,
    "checkpoint__keep": 0,
    "layout__tp": 0,
    "layout__dp": 0,
    "layout__replicate": 0,
    "schedule__residency": 0,
    "schedule__prefetch": -1,
    "schedule__gradient_buffers": 0,
    "data__validation_fraction": 0.0,
    "optimizer__lr_min_fraction": -0.1,
}
SMALLEST = {
    "training__stall_timeout_s": 1.0,
    "optimizer__weight_decay": 0.0,
    "optimizer__lr_min_fraction": 0.0,
}
TOO_LARGE = {
    "data__validation_fraction": 1.1,
    "optimizer__lr_min_fraction": 1.5,
    "optimizer__lr": math.inf,
    "optimizer__clip_grad_norm": math.nan,
    "training__stall_timeout_s": math.inf,
}


@pytest.mark.parametrize(("name", "value"), [*TOO_SMALL.items(), *TOO_LARGE.items()])
def test_a_value_out_of_range_is_named_with_what_was_found(name, value):
    dotted = name.replace("__", ".")
    problems = find_problems(changed(**{name: value}))
    assert [p for p in problems if p.startswith(f"{dotted} must ") and p.endswith(f"found {value}")]


def test_an_infinite_value_is_refused_as_such():
    (problem,) = find_problems(changed(optimizer__lr=math.inf))
    assert problem == "optimizer.lr must be above 0 and finite, found inf"
    (problem,) = find_problems(changed(training__stall_timeout_s=math.inf))
    assert problem == "training.stall_timeout_s must be at least 1 and finite, found inf"


@pytest.mark.parametrize("name", TOO_SMALL)
def test_the_smallest_allowed_value_is_allowed(name):
    whole = isinstance(TOO_SMALL[name], int)
    least = SMALLEST.get(name, TOO_SMALL[name] + 1 if whole else 1e-9)
    shared = {} if name == "layout__dp" else {"layout__shard": "full", "layout__dp": 2}
    beside = shared | {"data__tokenizer": "bpe", "training__device": "cuda"}
    mine = [
        p
        for p in find_problems(changed(**{name: least}, **beside), trains=False)
        if p.startswith(name.replace("__", "."))
    ]
    assert mine in ([], ["model.num_heads must divide model.hidden_size, found 6 and 1"])


MODEL = {
    "a width of feed-forward blocks that no layer has": (
        {"model__experts": 4, "model__expert_ffn": 64, "model__ffn_size": 512},
        "model.ffn_size 512 has no effect with model.expert_ffn 64, which every layer has; leave model.ffn_size out",
    ),
    "a window that no layer has": (
        {"model__window": 4, "model__full_attention_layers": tuple(range(8))},
        "model.window has no effect where model.full_attention_layers names every layer; leave both out",
    ),
    "heads that do not divide the width": (
        {"model__num_heads": 5},
        "model.num_heads must divide model.hidden_size, found 5 and 192",
    ),
    "an odd head with rotary positions": (
        {"model__hidden_size": 18, "model__num_heads": 6},
        "rotary positions need an even model.hidden_size / model.num_heads, found 18 / 6",
    ),
    "key heads that do not divide the heads": (
        {"model__num_kv_heads": 4},
        "model.num_kv_heads must divide model.num_heads, found 4 and 6",
    ),
    "a schedule that trains nothing": (
        {"schedule__family": "forward-only"},
        "schedule.family forward-only trains nothing; use breadth-first",
    ),
    "an unknown schedule": ({"schedule__family": "hybrd"}, "did you mean 'hybrid'?"),
    "an unknown placement": ({"schedule__placement": "u"}, "there is no placement 'u'"),
    "no rank": ({"layout__pp": 0}, "pp must be at least 1, found 0"),
    "no loop": ({"layout__loops": 0}, "loops must be at least 1, found 0"),
    "no micro-batch": ({"layout__num_microbatches": 0}, "layout.num_microbatches must be at least 1, found 0"),
    "a group size without groups": ({"schedule__group_size": 4}, "breadth-first takes no group size"),
    "loops without a looped schedule": ({"schedule__family": "1f1b"}, "1f1b runs one stage on each rank"),
    "more stages than pieces": ({"layout__loops": 3}, "4 pipeline ranks x 3 loops need 12 stages"),
    "a partition of another length": (
        {"layout__partition": (5, 5)},
        "layout.partition must name 8 stages, found 2",
    ),
    "an empty stage": (
        {"layout__partition": (0, 3, 2, 1, 1, 1, 1, 1)},
        "layout.partition must give every stage at least one piece",
    ),
    "a partition of another sum": (
        {"layout__partition": (1,) * 8},
        "layout.partition must add up to 10 (embedding, layers, head), found 8",
    ),
    "text that is not there": (
        {"data__path": Path("no-such-file")},
        "data.path must be a file or a folder, found nothing at no-such-file",
    ),
    "sizes from two places": (
        {"model__preset": "gpt-1t", "model__file": Path("config.json")},
        "model.preset and model.file both give the sizes; leave one out",
    ),
}
SEVERAL = "layout.dp x layout.cp of at least 2"
NEEDS = "{} have no effect without {} of at least 2; set that or leave them out"
AXES = {
    "heads that tensor parallelism cannot share out": (
        {"layout__tp": 4},
        "layout.tp must divide model.num_heads, found 4 and 6",
    ),
    "key heads that it cannot share out": (
        {"layout__tp": 3, "model__num_kv_heads": 2},
        "layout.tp must divide model.num_kv_heads, found 3 and 2",
    ),
    "a sequence split over nobody": (
        {"layout__sequence_parallel": True},
        "layout.sequence_parallel has no effect without layout.tp of at least 2; give both or leave it out",
    ),
    "a code of messages that nobody sends": (
        {"layout__boundary": "int8", "layout__pp": 1},
        "layout.boundary has no effect without layout.pp of at least 2; give both or leave it out",
    ),
    "a sequence that does not split": (
        {"layout__sequence_parallel": True, "layout__tp": 3},
        "layout.tp must divide data.seq_len, found 3 and 128",
    ),
    "a sequence that a context axis does not divide": (
        {"layout__cp": 3},
        "2 x layout.cp must divide data.seq_len, found 6 and 128",
    ),
    "slices of a sequence that ranks share": (
        {"layout__cp": 2, "layout__token_slices": 4},
        "layout.token_slices cuts sequences that layout.cp divides among ranks; leave one of them out",
    ),
    "copies of nothing": (
        {"layout__replicate": 2, "layout__dp": 4},
        "layout.replicate has no effect without layout.shard; give both or leave it out",
    ),
    "copies that do not come out even": (
        {"layout__replicate": 3, "layout__dp": 4, "layout__shard": "full"},
        "layout.replicate must divide layout.dp, found 3 and 4",
    ),
    "an order that leaves a rank out": (
        {"layout__pipeline_order": (0, 1, 1, 2)},
        "layout.pipeline_order must name each pipeline rank 0..3 once, found 0 1 1 2",
    ),
    "an order of too many ranks": (
        {"layout__pipeline_order": (0, 1, 2, 3, 4)},
        "layout.pipeline_order must name each pipeline rank 0..3 once, found 0 1 2 3 4",
    ),
    "room for nothing that moves": (
        {"schedule__activation_budget": "3GB"},
        "schedule.activation_budget has no effect without balance or offload; give both or leave it out",
    ),
    "no room to offload from": (
        {"schedule__offload": True},
        "schedule.offload moves what schedule.activation_budget has no room for; set it",
    ),
    "a balance of one": (
        {"schedule__balance": True, "layout__pp": 1},
        "schedule.balance has no effect without layout.pp of at least 2; give both or leave it out",
    ),
    "shards of one rank": (
        {"layout__shard": "full"},
        "layout.shard has no effect without layout.dp x layout.cp of at least 2; give both or leave it out",
    ),
    "a residency of what always stays": (
        {"schedule__residency": 2, "layout__shard": "optimizer", "layout__dp": 2},
        "schedule.residency has no effect without layout.shard full; give both or leave it out",
    ),
    "a prefetch of nothing": (
        {"schedule__prefetch": 2},
        f"schedule.prefetch has no effect without layout.shard and {SEVERAL}; give both or leave it out",
    ),
    "shards for nobody else": (
        {"layout__shard": "full", "schedule__residency": 2, "schedule__prefetch": 2},
        NEEDS.format("layout.shard, schedule.residency, schedule.prefetch", "layout.dp x layout.cp"),
    ),
    "a pipeline of one": (
        {"layout__pp": 1, "layout__pipeline_order": (0,), "schedule__receive_buffers": 3},
        NEEDS.format("layout.pipeline_order, schedule.receive_buffers", "layout.pp"),
    ),
    "angles of learned positions": (
        {"model__family": "gpt2", "model__rope_theta": 5e5},
        "model.rope_theta has no effect without a model.family with rotary positions; give both or leave it out",
    ),
    "a factor of no scaling": (
        {"model__rope_factor": 2.0},
        "model.rope_factor has no effect without model.rope_scaling; give both or leave it out",
    ),
    "scaling without its factor": (
        {"model__rope_scaling": "yarn", "model__rope_original_len": 64},
        "model.rope_scaling yarn needs model.rope_factor",
    ),
    "scaled angles that are all equal": (
        {
            "model__rope_scaling": "yarn",
            "model__rope_factor": 2.0,
            "model__rope_original_len": 64,
            "model__rope_theta": 1.0,
        },
        "model.rope_theta must be above 1 for model.rope_scaling yarn, found 1",
    ),
    "a size of no vocabulary": (
        {"data__bpe_vocab_size": 8192},
        "data.bpe_vocab_size has no effect without data.tokenizer bpe; give both or leave it out",
    ),
    "more frozen layers than there are": (
        {"training__freeze_layers": 9},
        "training.freeze_layers must be at most model.num_layers 8, found 9",
    ),
    "a frozen embedding that is the head": (
        {"training__freeze_layers": 0, "model__tied": True},
        "training.freeze_layers freezes the embedding, which with model.tied is the head's matrix; leave it out",
    ),
    "frozen layers and halves of backwards": (
        {"training__freeze_layers": 1, "schedule__family": "zb-h1", "layout__loops": 1},
        "training.freeze_layers does not work with schedule.family zb-h1, which splits backwards; use breadth-first",
    ),
    "frozen layers and balanced memory": (
        {"training__freeze_layers": 1, "schedule__balance": True},
        "training.freeze_layers does not work with schedule.balance; leave one of them out",
    ),
    "a compiler that compiles nothing": (
        {"training__compile_backend": "aot_eager"},
        "training.compile_backend has no effect without training.compile; give both or leave it out",
    ),
    "running ahead of no device": (
        {"training__run_ahead": 8},
        "training.run_ahead has no effect without training.device cuda; give both or leave it out",
    ),
    "more experts of a token than there are": (
        {"model__experts": 2, "model__experts_per_token": 3},
        "model.experts_per_token must be at most model.experts 2, found 3",
    ),
    "no layer with experts": (
        {"model__experts": 2, "model__expert_every": 9},
        "model.expert_every must be at most model.num_layers 8, found 9",
    ),
    "experts of blocks without gates": (
        {"model__experts": 2, "model__family": "gpt2"},
        "model.experts needs gated feed-forward blocks, found model.family gpt2; use llama",
    ),
    "sizes of no experts": (
        {"model__expert_ffn": 64},
        "model.expert_ffn has no effect without model.experts; give both or leave it out",
    ),
    "experts over ranks that do not divide them": (
        {"model__experts": 4, "layout__dp": 3, "layout__ep": 3},
        "layout.ep must divide model.experts, found 3 and 4",
    ),
    "experts over ranks that do not divide the replicas": (
        {"model__experts": 4, "layout__dp": 3, "layout__ep": 2},
        "layout.ep must divide layout.dp, found 2 and 3",
    ),
    "a capacity of divided micro-batches": (
        {"model__experts": 4, "model__expert_capacity": 1.0, "layout__token_slices": 2},
        "model.expert_capacity counts whole micro-batches, and layout.token_slices cuts them; leave one of them out",
    ),
    "halves of one sequence": (
        {
            "model__experts": 4,
            "layout__dp": 2,
            "layout__ep": 2,
            "layout__ep_overlap": True,
            "layout__microbatch_size": 1,
        },
        "layout.ep_overlap needs micro-batches of two sequences or more, found layout.microbatch_size 1",
    ),
    "a capacity of halves": (
        {
            "model__experts": 4,
            "model__expert_capacity": 1.0,
            "layout__dp": 2,
            "layout__ep": 2,
            "layout__ep_overlap": True,
        },
        (
            "layout.ep_overlap does not work with model.expert_capacity, which counts whole micro-batches; leave one "
            "of them out"
        ),
    ),
    "loads of experts that no ranks share": (
        {"model__experts": 4, "layout__dp": 2, "machine__expert_load": 1.5},
        "machine.expert_load has no effect without layout.ep of at least 2; give both or leave it out",
    ),
    "experts over ranks of copies": (
        {"model__experts": 4, "layout__dp": 4, "layout__ep": 2, "layout__replicate": 2, "layout__shard": "full"},
        (
            "layout.ep does not work with layout.replicate, which divides the ranks that share state; leave one of "
            "them out"
        ),
    ),
    "experts over ranks that are compared": (
        {"model__experts": 4, "layout__dp": 2, "layout__ep": 2, "training__check_every": 2},
        (
            "layout.ep does not work with training.check_every, whose ranks compute stages without the others; "
            "leave one of them out"
        ),
    ),
    "ranks of no experts": (
        {"layout__dp": 2, "layout__ep": 2},
        "layout.ep has no effect without model.experts; give both or leave it out",
    ),
    "blocks that do not divide the matrices": (
        {"model__density": 0.25, "model__hidden_size": 96, "model__ffn_size": 96},
        (
            "model.density 0.25 does not fit query, key, value, output, gate, up, down: blocks of 64 do not divide "
            "its 96 inputs and 96 outputs"
        ),
    ),
    "a part of a block": (
        {"model__density": 0.25, "model__ffn_size": 256},
        (
            "model.density 0.25 does not fit query, key, value, output, gate, up: a row of its 3 blocks keeps 0.75 of "
            "them, which must be a whole number"
        ),
    ),
    "a dense density": (
        {"model__density": 1.0},
        "model.density must be below 1, found 1; leave it out for dense matrices",
    ),
    "blocks of dense matrices": (
        {"model__density_block": 32, "model__density_seed": 1},
        "model.density_block, model.density_seed have no effect without model.density; set that or leave them out",
    ),
    "blocks with tensor parallelism": (
        {"model__density": 1 / 3, "model__ffn_size": 384, "layout__tp": 2},
        "model.density does not work with layout.tp 2, which divides matrices between ranks; leave one of them out",
    ),
    "blocks with an optimizer of whole matrices": (
        {"model__density": 1 / 3, "model__ffn_size": 384, "optimizer__name": "adafactor"},
        (
            "model.density does not work with optimizer.name adafactor, which updates whole matrices; leave one of "
            "them out"
        ),
    ),
    "blocks with adapters": (
        {"model__density": 1 / 3, "model__ffn_size": 384, "adapter__rank": 4},
        "model.density does not work with adapter.rank 4, whose pairs belong to dense matrices; leave one of them out",
    ),
    "experts with adapters": (
        {"model__experts": 2, "adapter__rank": 4, "adapter__targets": ("q", "gate")},
        (
            "adapter.targets must be matrices of attention (q k v o) in a model with experts, whose products have as "
            "many rows as tokens choose them, found gate"
        ),
    ),
    "halves in turns that are compiled": (
        {
            "model__experts": 4,
            "layout__pp": 1,
            "layout__dp": 2,
            "layout__ep": 2,
            "layout__ep_overlap": True,
            "training__compile": True,
        },
        "layout.ep_overlap does not work with training.compile, which compiles whole layers; leave one of them out",
    ),
    "biases of experts with adapters": (
        {"model__experts": 2, "model__balance": "bias", "adapter__rank": 4},
        "model.balance bias moves routers, which adapter.rank freezes; use none, or a loss: batch or microbatch",
    ),
    "the whole batch in an order that does not know it": (
        {"model__experts": 2, "schedule__family": "depth-first"},
        (
            "model.balance batch needs the loads of experts in the whole batch before the first backward, but a "
            "backward of stage 2 precedes one of its forwards; use schedule.family breadth-first, or model.balance "
            "microbatch"
        ),
    ),
    "loads of parts of micro-batches": (
        {"model__experts": 2, "model__balance": "microbatch", "layout__token_slices": 2},
        "model.balance microbatch counts whole micro-batches, and layout.token_slices cuts them; use batch",
    ),
    "a loss without a weight": (
        {"model__experts": 2, "model__balance": "bias", "model__balance_weight": 0.1},
        "model.balance_weight has no effect without model.balance batch or microbatch; give both or leave it out",
    ),
    "a limit of nothing": (
        {"schedule__activation_budget": "0", "schedule__balance": True},
        "schedule.activation_budget: expected a size such as 64MiB or 1.5GB, found '0'",
    ),
}


@pytest.mark.parametrize("title", AXES)
def test_axes_that_do_not_fit_together_are_named(title):
    values, sentence = AXES[title]
    assert find_problems(changed(**values), trains=False) == [sentence]


def test_training_takes_a_sequence_that_tensor_parallelism_can_share_out():
    config = changed(layout__tp=3, data__seq_len=128)
    assert find_problems(config, trains=False) == []
    (problem,) = find_problems(config)
    assert problem.startswith("layout.tp must divide data.seq_len")
    assert find_problems(changed(layout__tp=2, layout__sequence_parallel=True)) == []


def test_layers_that_recompute_are_named_one_by_one_or_all_at_once():
    assert find_problems(changed(layout__recompute_layers=("full",) * 8)) == []
    both = changed(layout__recompute="full", layout__recompute_layers=("none", "full"))
    assert find_problems(both) == [
        "layout.recompute and layout.recompute_layers both set what is recomputed; leave one out",
        "layout.recompute_layers must name 8 layers (model.num_layers), found 2",
    ]


def test_what_is_only_simulated_needs_no_text_here():
    assert find_problems(changed(data__path=Path("no-such-file")), trains=False) == []


def test_a_model_without_final_sizes_is_not_checked():
    assert find_problems(changed(layout__tp=4, model__num_layers=1), trains=False, is_model_known=False) == []


@pytest.mark.parametrize("title", MODEL)
def test_settings_that_do_not_fit_together_are_named(title):
    values, sentence = MODEL[title]
    (problem,) = find_problems(changed(**values))
    assert sentence in problem


def test_one_rank_that_is_left_has_none_to_spare():
    config = changed(layout__pp=2, restart__times=1, restart__layout="plan")
    left = config.under(replace(config.layout, pp=1))
    assert find_problems(config) == find_problems(left) == []
    assert left.restart.layout == "same"
    assert config.under(config.layout).restart.layout == "plan"


def test_checkpoints_that_a_limit_or_an_earlier_start_add_may_be_limited_to_a_number():
    alone = {"checkpoint__every_s": 0.0, "checkpoint__keep": 1}
    (problem,) = find_problems(changed(**alone))
    assert problem.startswith("checkpoint.keep has no effect without checkpoint.every or checkpoint.every_s")
    assert find_problems(changed(**alone, checkpoint__time_limit_s=60.0)) == []
    assert find_problems(changed(**alone, checkpoint__every=5)) == []


def test_a_partition_that_fits_is_no_problem():
    assert find_problems(changed(layout__partition=(2, 1, 1, 1, 1, 1, 1, 2))) == []


def test_an_odd_head_is_no_problem_without_rotary_positions():
    assert find_problems(changed(model__family="gpt2", model__hidden_size=18)) == []


def test_problems_of_all_sections_are_reported_together():
    config = changed(model__num_layers=0, data__seq_len=0, layout__pp=0, optimizer__lr=-1.0, training__steps=0)
    assert len(find_problems(config)) >= 5


@pytest.mark.parametrize(
    ("family", "width", "inner"), [("llama", 192, 512), ("llama", 64, 192), ("llama", 96, 256), ("gpt2", 192, 768)]
)
def test_derived_sizes_are_filled_in(family, width, inner):
    model = changed(model__family=family, model__hidden_size=width).model.resolve(vocab_size=256)
    assert (model.ffn_size, model.num_kv_heads, model.vocab_size) == (inner, 6, 256)


def test_given_sizes_are_kept():
    model = changed(model__ffn_size=100, model__num_kv_heads=2, model__vocab_size=300).model.resolve(vocab_size=256)
    assert (model.ffn_size, model.num_kv_heads, model.vocab_size) == (100, 2, 300)


def test_a_dictionary_of_the_configuration_has_plain_values_only():
    tree = to_dict(changed(data__path=Path("text.txt")))
    assert set(tree) == set(SECTIONS)
    assert tree["data"]["path"] == "text.txt"
    assert "cache" not in tree["data"]
    assert {type(value) for section in tree.values() for value in section.values()} <= {str, int, float, tuple, bool}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"layout__token_slices": 0}, "layout.token_slices must lie between 1 and data.seq_len 128, found 0"),
        ({"layout__token_slices": 129}, "layout.token_slices must lie between 1 and data.seq_len 128, found 129"),
        ({"layout__token_slices": (64, 65)}, "layout.token_slices must add up to data.seq_len 128, found 129"),
        ({"layout__token_slices": (128, 0)}, "layout.token_slices must name lengths of at least one token each"),
        ({"layout__token_slices": (65, 63), "layout__tp": 2}, "layout.tp must divide each of layout.token_slices"),
    ],
)
def test_slices_that_do_not_fit_the_sequences_are_refused(values, expected):
    assert any(problem.startswith(expected) for problem in find_problems(changed(**values), trains=False))


@pytest.mark.parametrize(
    ("wanted", "tp", "lengths"),
    [(None, 1, (128,)), (3, 1, (43, 43, 42)), (3, 4, (44, 44, 40)), ((100, 28), 1, (100, 28)), ("auto", 1, (128,))],
)
def test_lengths_of_slices(wanted, tp, lengths):
    layout = changed(layout__token_slices=wanted, layout__tp=tp).layout
    assert layout.slice_lengths(128) == lengths
    assert layout.num_slices == len(lengths)


def test_whole_matrices_are_not_divided_by_tensor_parallelism(monkeypatch):
    rule = replace(OPTIMIZERS["sgd"], matrices=Matrices(takes=lambda name, shape: True, state={}))
    monkeypatch.setattr(sections.OptimizerConfig, "rule", rule)
    assert find_problems(changed(layout__tp=1)) == []
    (problem,) = find_problems(changed(layout__tp=2))
    assert (
        problem
        == "optimizer.name adamw updates whole matrices, which layout.tp 2 divides between ranks; set layout.tp 1"
    )


def test_a_section_of_a_run_is_of_its_type():
    with pytest.raises(CallError, match=r"layout must be a Layout, found \{'pp': 2\}"):
        RunConfig(layout={"pp": 2})
