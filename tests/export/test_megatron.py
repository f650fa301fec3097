"""Megatron-LM: flags where it can express the run, and every reason where it cannot."""

import re

import pytest
from launch_runs import command_of, reasons_of, run_of, values_of, written_for

from pipeloom.export import text
from pipeloom.export.megatron import layer_layout
from pipeloom.export.megatron_order import is_megatrons
from pipeloom.families import FAMILIES, Rows, backward, family, forward, make_schedule


def command(folder, **sections):
    (script,) = written_for("megatron", folder, **sections).files
    return command_of(script, MEGATRON="/megatron", DATA="mock")


def value(found, name):
    (one,) = values_of(found, f"--{name}")
    return one


def test_a_llama_with_its_layout_batch_and_partition(tmp_path):
    found = command(tmp_path, layout={"microbatch_size": 2, "dp": 2}, training={"dtype": "bfloat16"})
    assert found[found.index("--master-port") + 2] == "/megatron/pretrain_gpt.py"
    for name, expected in {
        "num-layers": "10",
        "hidden-size": "64",
        "ffn-hidden-size": "192",
        "num-attention-heads": "4",
        "num-query-groups": "2",
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "rotary-base": "10000",
        "seq-length": "128",
        "max-position-embeddings": "128",
        "vocab-size": "511",
        "tokenizer-type": "NullTokenizer",
        "tensor-model-parallel-size": "1",
        "pipeline-model-parallel-size": "4",
        "pipeline-model-parallel-layout": "Et|t|t|t*2|t*2|t|t|tL",
        "microbatch-group-size-per-virtual-pipeline-stage": "4",
        "micro-batch-size": "2",
        "global-batch-size": "32",
        "train-iters": "200",
    }.items():
        assert value(found, name) == expected
    switches = {"--swiglu", "--group-query-attention", "--untie-embeddings-and-output-weights", "--disable-bias-linear"}
    assert {*switches, "--bf16", "--accumulate-allreduce-grads-in-fp32", "--overlap-grad-reduce"} <= set(found)
    assert not {"--use-distributed-optimizer", "--num-virtual-stages-per-pipeline-rank"} & set(found)


def test_a_gpt2_and_stages_of_equal_layers(tmp_path):
    model = {"family": "gpt2", "num_layers": 8, "num_kv_heads": 4, "tied": True}
    layout = {"partition": [2, 1, 1, 1, 1, 1, 1, 2], "tp": 2, "sequence_parallel": True}
    found = command(tmp_path, model=model, layout=layout)
    assert value(found, "num-virtual-stages-per-pipeline-rank") == "2"
    assert value(found, "normalization") == "LayerNorm"
    assert value(found, "position-embedding-type") == "learned_absolute"
    assert "--sequence-parallel" in found
    for flag in ("pipeline-model-parallel-layout", "swiglu", "group-query-attention", "bf16", "disable-bias-linear"):
        assert f"--{flag}" not in found
    assert "--untie-embeddings-and-output-weights" not in found


@pytest.mark.parametrize(
    ("software", "dtype", "expected"),
    [
        ("pipeloom", "bfloat16", ["--bf16", "--accumulate-allreduce-grads-in-fp32"]),
        ("megatron-core", "bfloat16", ["--bf16", "--grad-reduce-in-bf16"]),
        ("megatron-core", "float16", ["--fp16"]),
        ("pipeloom", "float16", ["--fp16", "--accumulate-allreduce-grads-in-fp32"]),
        ("megatron-core", "float32", []),
    ],
)
def test_gradients_have_the_bytes_that_were_predicted(tmp_path, software, dtype, expected):
    sections = {"machine": {"software": software, "cluster": "dgx-a100"}, "training": {"dtype": dtype}}
    written = written_for("megatron", tmp_path, **sections)
    flags = ("--bf16", "--fp16", "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16")
    found = command_of(written.files[0], MEGATRON="/megatron", DATA="mock")
    assert [flag for flag in flags if flag in found] == expected
    is_said = any(f"gradients of micro-batches and ranks add up in {dtype}" in one for one in written.notes.differs)
    assert is_said == (software == "megatron-core" and dtype != "float32")


def test_gradients_that_were_predicted_with_two_widths_are_wide_and_it_is_said(tmp_path):
    machine, training = {"software": "zero-bubble"}, {"dtype": "bfloat16"}
    schedule, layout = {"family": "1f1b"}, {"loops": 1}
    written = written_for("megatron", tmp_path, machine=machine, training=training, schedule=schedule, layout=layout)
    assert "--accumulate-allreduce-grads-in-fp32" in written.files[0].read_text()
    assert any("zero-bubble has them in 2 and 4" in one for one in written.notes.differs)


@pytest.mark.parametrize(("software", "tp"), [("megatron-core", 2), ("megatron-core", 1), ("pipeloom", 2)])
def test_exchanges_beside_products_are_named_where_the_prediction_has_them(tmp_path, software, tp):
    layout = {"tp": tp, "sequence_parallel": tp > 1}
    written = written_for("megatron", tmp_path, machine={"software": software}, layout=layout)
    is_said = any(one.startswith("--tp-comm-overlap is left out") for one in written.notes.differs)
    assert is_said == (software == "megatron-core" and tp > 1)
    assert "\n  --tp-comm-overlap" not in written.files[0].read_text()


@pytest.mark.parametrize(("vocab", "tp", "part"), [(151936, 1, 151936), (151936, 2, 75968), (513, 2, 1)])
def test_the_vocabulary_is_the_planned_one_whatever_the_tokenizer_has(tmp_path, vocab, tp, part):
    found = command(tmp_path, model={"vocab_size": vocab}, layout={"tp": tp})
    assert value(found, "make-vocab-size-divisible-by") == str(part)


def test_no_mask_of_the_square_of_a_sequence_is_made(tmp_path):
    assert "--no-create-attention-mask-in-dataloader" in command(tmp_path, data={"seq_len": 131_072})


def test_other_data_and_more_flags_go_over(tmp_path):
    (script,) = written_for("megatron", tmp_path).files
    found = command_of(script, MEGATRON="/megatron", DATA="--data-path 0.5 a 0.5 b", RUN="/run")
    assert values_of(found, "--data-path") == ["0.5", "a", "0.5", "b"]
    assert "--mock-data" not in found
    assert values_of(found, "--load") == values_of(found, "--save") == ["/run"]


@pytest.mark.parametrize(
    ("layers", "expected"), [((0, 2, 12, 0), "E|t*2|t*12|L"), ((1, 1), "Et|tL"), ((1, 0, 3), "Et||t*3L")]
)
def test_a_layout_of_layers(layers, expected):
    assert layer_layout(layers) == expected


@pytest.mark.parametrize("group_size", [4, 5, 8])
@pytest.mark.parametrize("family", ["hybrid", "depth-first"])
def test_the_group_size_is_a_flag_where_the_order_is_the_same(tmp_path, family, group_size):
    layout, schedule = {"num_microbatches": 2 * group_size}, {"family": family}
    if family == "hybrid":
        schedule["group_size"] = group_size
    elif group_size % 4:
        return
    found = command(tmp_path, layout=layout, schedule=schedule)
    expected = group_size if family == "hybrid" else 4
    assert value(found, "microbatch-group-size-per-virtual-pipeline-stage") == str(expected)


def test_breadth_first_is_handed_over_with_what_is_different(tmp_path):
    written = written_for("megatron", tmp_path, schedule={"family": "breadth-first"})
    found = command_of(written.files[0], MEGATRON="/megatron", DATA="mock")
    assert value(found, "microbatch-group-size-per-virtual-pipeline-stage") == "8"
    (sentence,) = (one for one in written.notes.differs if one.startswith("order: "))
    assert "forwards are those of breadth-first" in sentence
    assert "hybrid and group_size 8" in sentence
    assert "Differences from pipeloom:" in written.files[0].read_text()
    same = run_of(schedule={"family": "hybrid", "group_size": 8}).choice().make()
    assert is_megatrons(same.rows, 2, 8, 8)
    assert (
        written_for(
            "megatron", tmp_path, schedule={"family": "hybrid", "group_size": 8}, checkpoint={"every": 5}
        ).notes.differs
        == ()
    )


def test_1f1b_is_without_loops(tmp_path):
    found = command(tmp_path, layout={"loops": 1}, schedule={"family": "1f1b"})
    for flag in ("microbatch-group-size-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"):
        assert f"--{flag}" not in found


@pytest.mark.parametrize(("pp", "loops", "count", "size"), [(2, 2, 6, 3), (3, 2, 9, 3), (4, 3, 8, 8), (2, 4, 6, 2)])
def test_a_hybrid_of_whole_groups_is_megatrons_order_and_one_action_elsewhere_is_not(pp, loops, count, size):
    rows = make_schedule("hybrid", pp=pp, loops=loops, num_microbatches=count, group_size=size).rows
    assert is_megatrons(rows, loops, count, size)
    swapped = [list(row) for row in rows]
    swapped[0][0], swapped[0][1] = swapped[0][1], swapped[0][0]
    assert not is_megatrons(swapped, loops, count, size)


def test_context_parallelism_goes_around_as_here(tmp_path):
    layout = {"dp": 2, "cp": 2, "shard": "optimizer"}
    found = command(tmp_path, layout=layout)
    assert (value(found, "context-parallel-size"), value(found, "cp-comm-type")) == ("2", "p2p")
    assert "--num-distributed-optimizer-instances" not in found
    copies = command(tmp_path, layout={**layout, "replicate": 2})
    assert value(copies, "num-distributed-optimizer-instances") == "2"
    assert "--context-parallel-size" not in command(tmp_path, layout={"dp": 2})


def test_sharding_of_the_optimizer_and_hybrid_sharding(tmp_path):
    layout = {"dp": 4, "shard": "optimizer"}
    plain = command(tmp_path, layout=layout)
    assert {"--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"} <= set(plain)
    assert values_of(plain, "--num-distributed-optimizer-instances") is None
    hybrid = command(tmp_path, layout={**layout, "replicate": 2})
    assert value(hybrid, "num-distributed-optimizer-instances") == "2"


@pytest.mark.parametrize(("shard", "strategy"), [("gradients", "optim_grads"), ("full", "optim_grads_params")])
def test_more_sharding_takes_fsdp_and_no_pipeline(tmp_path, shard, strategy):
    layout = {"pp": 1, "loops": 1, "dp": 4, "shard": shard}
    written = written_for("megatron", tmp_path, layout=layout)
    found = command_of(written.files[0], MEGATRON="/megatron", DATA="mock")
    assert value(found, "data-parallel-sharding-strategy") == strategy
    assert {"--use-megatron-fsdp", "--no-gradient-accumulation-fusion"} <= set(found)
    assert "connections=0" in written.files[0].read_text()
    assert any("for each micro-batch" in sentence for sentence in written.notes.differs)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"recompute": "none"}, None),
        ({"recompute": "selective"}, ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"]),
        ({"recompute": "full"}, ["full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]),
        (
            {"recompute_layers": ["full", "none", "full", "none", "full"], "partition": [3, 4]},
            None,
        ),
        (
            {"recompute_layers": ["full", "none", "full", "none", "none"], "partition": [3, 4]},
            ["full", "--recompute-method", "block", "--recompute-num-layers", "1"],
        ),
    ],
)
def test_recomputation(tmp_path, layout, expected):
    sections = {"model": {"num_layers": 5}, "schedule": {"family": "1f1b"}}
    sections["layout"] = {"pp": 2, "loops": 1, "partition": [4, 3], **layout}
    if "recompute_layers" in layout and expected is None:
        (reason,) = reasons_of("megatron", tmp_path, **sections)
        assert reason.startswith("layout.recompute_layers")
        return
    found = command(tmp_path, **sections)
    if expected is None:
        assert "--recompute-granularity" not in found
    else:
        assert " ".join(expected) in " ".join(found)


def test_what_has_no_counterpart_is_named(tmp_path):
    training = {"compile": True, "compile_backend": "aot_eager"}
    written = written_for(
        "megatron",
        tmp_path,
        training=training,
    )
    printed = "\n".join((*written.notes.left_out, *written.notes.differs))
    for words in (
        "training.compile",
        "receive_buffers",
        "machine.attention",
        "training.seed",
    ):
        assert words in printed


REFUSED = {
    "gpipe": ({"layout": {"loops": 1}, "schedule": {"family": "gpipe"}}, "schedule.family gpipe with layout.loops 1"),
    "long warm-up": ({"layout": {"loops": 1}}, "schedule.family depth-first with layout.loops 1"),
    "v": ({"schedule": {"placement": "v"}}, "schedule.placement v"),
    "linear": ({"schedule": {"placement": "linear"}}, "schedule.placement linear"),
    "rest": ({"layout": {"num_microbatches": 10}}, "layout.num_microbatches 10 in groups of 4 leaves 2"),
    "spread": (
        {"layout": {"num_microbatches": 14}, "schedule": {"family": "hybrid", "group_size": 5}},
        "schedule.family hybrid: layout.num_microbatches 14 is not a multiple of the group size 5",
    ),
    "few": ({"layout": {"num_microbatches": 3}}, "layout.num_microbatches 3 is below layout.pp 4"),
    "gradients": ({"layout": {"dp": 2, "shard": "gradients"}}, "layout.shard gradients with layout.pp 4"),
    "full": ({"layout": {"dp": 2, "shard": "full"}}, "layout.shard full with layout.pp 4"),
    "hybrid full": (
        {"layout": {"pp": 1, "loops": 1, "dp": 4, "shard": "full", "replicate": 2}},
        "layout.replicate 2 with layout.shard full",
    ),
    "accumulation": ({"layout": {"pp": 1}, "schedule": {"family": "breadth-first"}}, "layout.pp 1 with"),
    "mixture": ({"layout": {"recompute_layers": ["none"] * 9 + ["full"]}}, "layout.recompute_layers"),
    "selective mixture": (
        {"layout": {"recompute_layers": ["selective"] * 5 + ["full"] * 5}},
        "layout.recompute_layers",
    ),
    "float64": ({"training": {"dtype": "float64"}}, "training.dtype float64"),
    "theta": ({"model": {"rope_theta": 10000.5}}, "model.rope_theta 10000.5"),
    "scaling": ({"model": {"rope_scaling": "linear", "rope_factor": 4.0}}, "model.rope_scaling linear"),
    "another first length": (
        {"model": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_len": 4096}},
        "model.rope_scaling llama3",
    ),
    "one expert": (
        {"model": {"experts": 4, "experts_per_token": 1, "balance": "none"}},
        "model.experts_per_token 1",
    ),
    "biases of experts": ({"model": {"experts": 4, "balance": "bias"}}, "model.balance bias"),
    "experts without sequence parallelism": (
        {"model": {"experts": 4, "balance": "none"}, "layout": {"pp": 2, "tp": 2}},
        "model.experts with layout.tp above 1",
    ),
    "sharded experts": (
        {"model": {"experts": 4, "balance": "none"}, "layout": {"pp": 1, "loops": 1, "dp": 4, "shard": "full"}},
        "model.experts with layout.shard full",
    ),
    "window and context": (
        {"model": {"window": 64}, "layout": {"pp": 2, "cp": 2}},
        "model.window with layout.cp above 1",
    ),
    "warm-up": ({"training": {"steps": 10}}, "optimizer.lr_warmup_steps 10"),
    "nodes": ({"layout": {"pp": 3, "dp": 2, "num_microbatches": 6}}, "6 processes do not fill"),
    "head": (
        {"layout": {"pp": 4}, "model": {"vocab_size": 8192}, "machine": {"software": "nanotron"}},
        "machine.software nanotron puts the head into stage 3, and leaves stage 7 empty",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_cannot_express_is_refused(tmp_path, name):
    sections, words = REFUSED[name]
    (reason,) = reasons_of("megatron", tmp_path, **sections)
    assert reason.startswith(words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if family.has_backward))
def test_a_family_that_megatron_does_not_run_is_refused_for_its_own_reason(tmp_path, name):
    known = FAMILIES[name]
    layout = {"loops": known.loops or (2 if known.is_looped else 1), "pp": 2, "num_microbatches": 8}
    if name in ("1f1b", "breadth-first", "depth-first", "hybrid"):
        written_for("megatron", tmp_path, layout=layout, schedule={"family": name})
        return
    (reason,) = reasons_of("megatron", tmp_path, layout=layout, schedule={"family": name})
    assert reason.startswith(f"schedule.family {name} ")
    assert ("splits backwards" if known.splits_backward else "runs one stage on each rank as 1F1B") in reason
    for suggested in re.split(", | or ", reason.rpartition("; use ")[2]):
        written_for("megatron", tmp_path, layout=layout, schedule={"family": suggested})


def test_the_order_of_another_package_is_not_a_matter_of_groups(tmp_path):
    @family("all-forwards", is_looped=True)
    def all_forwards(request):
        """All forwards of a rank, then its backwards in reverse order."""
        rows = []
        for rank in range(request.placement.num_ranks):
            pairs = [(stage, m) for stage in request.local_stages(rank) for m in range(request.num_microbatches)]
            rows.append([forward(*pair) for pair in pairs] + [backward(*pair) for pair in reversed(pairs)])
        return Rows(rows, [len(row) // 2 for row in rows])

    try:
        layout = {"pp": 2, "loops": 2, "num_microbatches": 4}
        (reason,) = reasons_of("megatron", tmp_path, layout=layout, schedule={"family": "all-forwards"})
    finally:
        FAMILIES.remove("all-forwards")
    assert reason.startswith("schedule.family all-forwards: Megatron-LM does not run this order; use breadth-first")


def test_all_reasons_come_at_once(tmp_path):
    layout = {"dp": 2, "shard": "full", "num_microbatches": 10, "recompute_layers": ["selective"] * 5 + ["full"] * 5}
    found = reasons_of("megatron", tmp_path, layout=layout, schedule={"placement": "v"}, training={"dtype": "float64"})
    assert len(found) == 5


def test_flags_have_every_digit_of_a_number():
    assert [text.flag("lr", value).values for value in (3e-4, 1.0, 0.00012345678)] == [
        ("0.0003",),
        ("1",),
        ("0.00012345678",),
    ]


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ({"family": "qwen2"}, {"--add-qkv-bias"}),
        ({"family": "qwen3", "head_size": 32}, {"--qk-layernorm"}),
        ({}, set()),
    ],
)
def test_a_family_that_differs_from_llama_by_flags(tmp_path, model, flags):
    found = command(tmp_path, model=model)
    assert {one for one in found if one in ("--add-qkv-bias", "--qk-layernorm")} == flags
    assert {"--disable-bias-linear", "--swiglu"} <= set(found)
    assert values_of(found, "--kv-channels") == (["32"] if "head_size" in model else None)


def test_positions_scaled_as_those_of_llama_3_1(tmp_path):
    scaling = {"rope_scaling": "llama3", "rope_factor": 32.0, "rope_original_len": 8192}
    found = command(tmp_path, model=scaling)
    assert "--use-rope-scaling" in found
    assert value(found, "rope-scaling-factor") == "32"
    assert "--use-rope-scaling" not in command(tmp_path)


def test_a_window_of_tokens_before_the_query_and_layers_without_one(tmp_path):
    assert value(command(tmp_path, model={"window": 64}), "window-size") == "63,0"
    found = command(tmp_path, model={"window": 64, "full_attention_layers": [0, 9]})
    assert value(found, "window-attn-skip-freq") == "[0,1,1,1,1,1,1,1,1,0]"
    # A window as long as the sequence bounds nothing.
    assert "--window-size" not in command(tmp_path, model={"window": 128})


EXPERTS = {"experts": 8, "expert_ffn": 96, "balance": "microbatch"}


def test_experts_over_data_parallel_ranks(tmp_path):
    model = {**EXPERTS, "experts_per_token": 3, "expert_every": 2, "shared_experts": 2, "balance_weight": 0.02}
    model["expert_capacity"] = 1.25
    layout = {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "shard": "optimizer"}
    found = command(tmp_path, model=model, layout=layout)
    for name, expected in {
        "num-experts": "8",
        "moe-router-topk": "3",
        "moe-ffn-hidden-size": "96",
        "ffn-hidden-size": "192",
        "moe-layer-freq": "[0,1,0,1,0,1,0,1,0,1]",
        "moe-shared-expert-intermediate-size": "192",
        "moe-expert-capacity-factor": "1.25",
        "moe-token-drop-policy": "position",
        "moe-router-load-balancing-type": "aux_loss",
        "moe-aux-loss-coeff": "0.02",
        "expert-model-parallel-size": "2",
    }.items():
        assert value(found, name) == expected
    assert "--num-experts" not in command(tmp_path)


def test_the_overlap_of_halves_of_a_micro_batch_is_left_out(tmp_path):
    layout = {"dp": 2, "ep": 2, "microbatch_size": 2, "ep_overlap": True}
    written = written_for("megatron", tmp_path, model={"experts": 4, "balance": "none"}, layout=layout)
    assert any("layout.ep_overlap" in sentence for sentence in written.notes.left_out)


def test_a_balance_over_the_batch_differs_and_none_has_no_loss(tmp_path):
    written = written_for("megatron", tmp_path, model={"experts": 4}, schedule={"family": "breadth-first"})
    assert any("model.balance batch" in sentence for sentence in written.notes.differs)
    found = command(tmp_path, model={"experts": 4, "balance": "none"})
    assert value(found, "moe-router-load-balancing-type") == "none"
    assert "--moe-aux-loss-coeff" not in found


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1.5e-4 * 0.1, "1.5e-05"),
        (8e-6 * 0.1, "8e-07"),
        (500000.0, "500000"),
        # Somebody's own number stays, whatever its digits.
        (0.00012345678901234567, "0.00012345678901234567"),
        (1.0000000000001e-4, "0.00010000000000001"),
    ],
)
def test_a_number_is_the_shortest_that_is_meant(number, expected):
    assert text.flag("--min-lr", number).values == (expected,)


def test_the_least_rate_is_a_short_number(tmp_path):
    found = command(tmp_path, optimizer={"lr": 1.5e-4, "lr_min_fraction": 0.1})
    assert value(found, "min-lr") == "1.5e-05"
