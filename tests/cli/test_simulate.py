"""``pipeloom simulate``: figures, files, examples, refusals."""

import json
import re
from pathlib import Path

import pytest
from thinned import thinned

from pipeloom.cli import main
from pipeloom.trace import from_chrome

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN, GPT_52B, GPT_1T = (str(EXAMPLES / f"{name}.toml") for name in ("run", "gpt-52b-64-v100", "gpt-1t-3072-a100"))
GPT_BOTH = str(EXAMPLES / "gpt-6.6b-mixed.toml")
SHARDED = ["--layout.dp", "4", "--layout.shard", "full"]


def answer(capsys, *words, status=0):
    assert main(["simulate", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def text(capsys, monkeypatch, *words, columns=80, status=0):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["simulate", *words]) == status
    return capsys.readouterr().out


def refusal(capsys, *words, command="simulate"):
    assert main([command, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("file", "devices", "ranks"), [(RUN, 4, 4), (GPT_52B, 64, 8), (GPT_1T, 3072, 64)], ids=["run", "52b", "1t"]
)
def test_every_example_is_answered_and_its_parts_add_up(capsys, file, devices, ranks):
    found = answer(capsys, file)
    assert found["num_devices"] == devices
    assert len(found["accounts"]) == len(found["memory"]) == ranks
    assert found["step_time_s"] == pytest.approx(found["pipeline_s"] + sum(found["after_s"].values()))
    for account in found["accounts"]:
        assert sum(account.values()) == pytest.approx(found["step_time_s"])
    for memory in found["memory"]:
        assert sum(memory.values()) == pytest.approx(2 * memory["total_bytes"])
    assert found["fits"]
    assert found["help"] == {}
    assert 0 < found["mfu"] <= found["hfu"] < 1
    run = found["run"]
    assert found["tokens_per_s"] == pytest.approx(run["global_batch"] * run["seq"] / found["step_time_s"])


@pytest.mark.parametrize(
    ("words", "dtype", "origin"),
    thinned(
        [
            (("--training.dtype", "bfloat16", "--machine.cluster", "dgx-h100"), "bfloat16", "bfloat16, "),
            (("--machine.cluster", "dgx-h100"), "bfloat16", "bfloat16 (the devices' default), "),
            (("--machine.cluster", "dgx-1-v100"), "float16", "float16 (the devices' default), "),
            ((), "float32", "float32 (the devices' default), "),
            (("--training.dtype", "float32", "--machine.cluster", "dgx-h100"), "float32", "float32, "),
        ],
        2,
    ),
)
@pytest.mark.parametrize("command", ["simulate", "plan", "slices"])
def test_one_setting_is_the_type_of_predictions_and_its_default_is_named(
    capsys, monkeypatch, words, dtype, origin, command
):
    if command == "plan":
        words = [
            word.replace("--training.dtype", "--dtype").replace("--machine.cluster", "--cluster") for word in words
        ]
        words = [RUN, "--best", "1", "--no-explain", "--pp", "4", "--loops", "4", "--families", "breadth-first", *words]
    assert main([command, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    found = found.get("question", found)
    assert (found["dtype"], found["has_default_dtype"]) == (dtype, "default" in origin)
    monkeypatch.setenv("COLUMNS", "200")
    assert main([command, *words]) == 0
    assert origin.rstrip(", ") in capsys.readouterr().out


def test_the_type_changes_the_prediction(capsys):
    words = ["--model.preset", "llama-3-8b", "--machine.cluster", "dgx-h100", "--layout.pp", "8"]
    narrow, wide = (answer(capsys, *words, "--training.dtype", dtype) for dtype in ("bfloat16", "float32"))
    assert narrow["step_time_s"] < wide["step_time_s"] / 4
    assert narrow["step_time_s"] == answer(capsys, *words)["step_time_s"]


def test_a_type_without_costs_is_refused_by_name(capsys):
    wanted = "must be one that AMD EPYC, one core computes in: float32, bfloat16, found float64"
    assert f"training.dtype {wanted}" in refusal(capsys, "--training.dtype", "float64")
    assert f"the dtype {wanted}" in refusal(capsys, RUN, "--dtype", "float64", command="plan")


def test_the_setting_that_there_was_is_refused_with_the_one_there_is(capsys, tmp_path):
    file = tmp_path / "old.toml"
    file.write_text('[machine]\nprecision = "bf16"\n')
    assert "no setting 'machine.precision' any more; use training.dtype = " in refusal(capsys, str(file))
    message = refusal(capsys, "--machine.precision", "bf16")
    assert "simulate has no flag --machine.precision any more; use training.dtype = " in message
    for command in ("plan", "tradeoff"):
        message = refusal(capsys, "--precision", "bf16", command=command)
        assert f"{command} has no flag --precision any more; use --dtype float32, bfloat16 or float16" in message


def test_fewer_micro_batches_than_pipeline_ranks_are_simulated_as_the_help_says(capsys):
    found = answer(capsys, "--layout.pp", "4", "--layout.num-microbatches", "2")
    assert found["bubble_fraction"] > 0.5
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", "--help-all"])
    help_text = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert "With fewer than pp, ranks are idle" in help_text
    assert "At least pp" not in help_text


def test_the_shapes_of_the_large_examples_are_the_published_ones(capsys):
    large, small = answer(capsys, GPT_1T)["run"], answer(capsys, GPT_52B)["run"]
    assert (large["dp"], large["tp"], large["pp"], large["global_batch"]) == (6, 8, 64, 3072)
    assert (large["shape"]["layers"], large["shape"]["hidden"], large["shape"]["heads"]) == (128, 25600, 160)
    assert (small["tp"], small["pp"], small["seq"]) == (8, 8, 1024)
    assert (small["shape"]["layers"], small["shape"]["hidden"], small["shape"]["heads"]) == (64, 8192, 64)


def test_a_simulated_trace_is_read_like_a_measured_one(capsys, tmp_path):
    file = tmp_path / "trace.json"
    found = answer(capsys, RUN, *SHARDED, "--trace", str(file))
    trace = from_chrome(file.read_text())
    assert trace.num_ranks == 4
    assert trace.end_s == pytest.approx(found["pipeline_s"], abs=1e-8)
    assert {str(lane) for lane in trace.lanes(0)} == {
        "compute", "data-parallel", "send to 1", "send to 3", "recv from 1", "recv from 3",
    }  # fmt: skip


def test_lanes_say_how_much_is_hidden(capsys):
    lanes = answer(capsys, RUN, *SHARDED)["communication"]
    assert {lane["rank"] for lane in lanes} == {0, 1, 2, 3}
    collectives = [lane for lane in lanes if lane["lane"] == "data-parallel"]
    assert len(collectives) == 4
    for lane in lanes:
        assert lane["busy_s"] == pytest.approx(lane["hidden_s"] + lane["exposed_s"])
    assert all(lane["hidden_s"] > 0 for lane in collectives)
    assert answer(capsys, GPT_52B, "--machine.software", "megatron-2021")["communication"] == []


def test_memory_over_time_has_its_peak_on_its_curve(capsys):
    found = answer(capsys, RUN, *SHARDED, "--memory-over-time")
    for curve, memory in zip(found["memory_over_time"], found["memory"], strict=True):
        assert max(size for _, size in curve["points"]) == curve["peak_bytes"] <= memory["total_bytes"]
        assert sum(curve["peak_parts"].values()) == pytest.approx(curve["peak_bytes"])
        assert 0 < curve["peak_s"] < found["pipeline_s"]
    assert "memory_over_time" not in answer(capsys, RUN)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_of_many_ranks_shows_the_first(capsys, tmp_path, ending):
    file = tmp_path / f"step.{ending}"
    words = ["--layout.pp", "20", "--layout.loops", "1", "--model.num-layers", "18", "--schedule.family", "1f1b"]
    assert main(["simulate", *words, "--plot", str(file)]) == 0
    assert f"picture           {file}" in capsys.readouterr().out
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_a_picture_or_trace_that_cannot_be_written_is_the_users_error(capsys, tmp_path):
    assert "cannot draw to" in refusal(capsys, RUN, "--plot", str(tmp_path / "step.gif"))
    assert "--trace: cannot write" in refusal(capsys, RUN, "--trace", str(tmp_path / "no" / "trace.json"))


def test_people_see_the_figures_of_the_json(capsys, monkeypatch):
    found = answer(capsys, GPT_52B)
    shown = text(capsys, monkeypatch, GPT_52B)
    assert re.search(rf"step time +{found['step_time_s'] * 1e3:,.0f} ms", shown)
    assert re.search(rf"tokens/s +{found['tokens_per_s']:,.0f}", shown)
    assert re.search(rf"MFU +{found['mfu']:.1%} of 125 TFLOP/s", shown)
    assert re.search(rf"HFU +{found['hfu']:.1%}", shown)
    assert re.search(rf"bubble fraction +{found['bubble_fraction']:.1%}", shown)
    compute_s = sum(account["compute_s"] for account in found["accounts"]) / 8
    assert re.search(rf"^compute\+tp +{compute_s * 1e3:,.0f} ", shown, flags=re.M)
    assert len(re.findall(r"^[0-7] +\d", shown, flags=re.M)) == 8
    assert "does not fit" not in shown


def test_every_lane_is_printed_with_its_flag(capsys, monkeypatch):
    lanes = answer(capsys, RUN, *SHARDED)["communication"]
    shown = text(capsys, monkeypatch, RUN, *SHARDED, "--lanes")
    for lane in lanes:
        assert re.search(rf"^{lane['rank']}: {lane['lane']} +{lane['actions']} ", shown, flags=re.M)
    assert "0: send to 1" not in text(capsys, monkeypatch, RUN, *SHARDED)


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
@pytest.mark.parametrize("file", [RUN, GPT_52B])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(capsys, monkeypatch, file, columns):
    shown = text(capsys, monkeypatch, file, *SHARDED, "--memory-over-time", "--lanes", columns=columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown


def test_a_step_that_does_not_fit_says_where_of_what_and_what_helps(capsys, monkeypatch):
    words = [GPT_52B, "--layout.recompute", "none", "--layout.microbatch-size", "4"]
    found = answer(capsys, *words, status=1)
    assert not found["fits"]
    most = max(memory["total_bytes"] for memory in found["memory"])
    assert most == found["memory"][found["fullest_rank"]]["total_bytes"] > found["device_memory_bytes"]
    shown = text(capsys, monkeypatch, *words, status=1)
    assert (
        f"does not fit: pipeline rank {found['fullest_rank']} needs {most / 1e9:.1f} GB of 34; most of it: activations"
        in shown
    )
    assert set(found["help"]) == {
        "layout.sequence_parallel true", "layout.recompute selective", "layout.recompute full",
    }  # fmt: skip
    fits = {setting for setting, total in found["help"].items() if total <= found["device_memory_bytes"]}
    assert set(re.findall(r"^  (layout\.\S+ \S+): .* GB, fits$", shown, flags=re.M)) == fits != set()


def test_where_nothing_helps_enough_that_is_printed(capsys, monkeypatch):
    shown = text(capsys, monkeypatch, GPT_52B, "--layout.tp", "1", "--layout.recompute", "full", status=1)
    assert "none of these is enough: more layout.pp or layout.tp" in shown


def test_all_problems_of_model_machine_and_layout_are_reported_at_once(capsys):
    words = ["--machine.cluster", "dgx", "--machine.software", "megatron", "--layout.tp", "3", "--layout.loops", "20"]
    message = refusal(capsys, GPT_52B, *words, "--layout.num-microbatches", "0", "--schedule.group-size", "4")
    assert message.startswith(f"pipeloom simulate: {GPT_52B} with the flags over it has 7 problems:")
    for sentence in (
        "8 pipeline ranks x 20 loops need 160 stages, but 64 layers",
        "layout.tp must divide model.num_heads, found 3 and 64",
        "layout.tp must divide model.num_kv_heads, found 3 and 64",
        "layout.num_microbatches must be at least 1, found 0",
        "breadth-first takes no group size",
        "there is no cluster 'dgx'",
        "there is no software 'megatron': did you mean 'megatron-2021', 'megatron-core' or 'megatron-deepspeed'?",
    ):
        assert sentence in message


def test_a_model_file_that_lacks_a_key_is_reported_with_the_rest(capsys, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4})
    )
    run = tmp_path / "run.toml"
    run.write_text(f'machine.cluster = "nowhere"\nmodel.file = "{tmp_path / "config.json"}"\nlayout.loop = 3\n')
    message = refusal(capsys, str(run))
    assert "has 5 problems" in message
    assert "num_attention_heads must be a whole number of at least 1, found None" in message
    assert "there is no setting 'layout.loop'; did you mean 'layout.loops'?" in message
    assert "there is no cluster 'nowhere'" in message


def test_a_preset_of_another_family_is_simulated_with_its_sizes(capsys):
    words = ["--model.preset", "llama-3-8b", "--machine.cluster", "dgx-h100", "--training.dtype", "bfloat16"]
    found = answer(capsys, *words, "--layout.tp", "8", "--data.seq-len", "8192")
    assert found["run"]["shape"]["kv_heads"] == 8
    assert found["run"]["shape"]["name"] == "llama-3-8b"


ON_BOTH = [GPT_BOTH, "--machine.cluster", str(EXAMPLES / "a100-and-v100.toml")]


def test_a_run_over_two_kinds_of_nodes_says_which_ranks_are_where(capsys, monkeypatch):
    found = answer(capsys, *ON_BOTH)
    shown = text(capsys, monkeypatch, *ON_BOTH, "--memory-over-time", "--lanes")
    assert [(place["kind"], place["first_node"], place["last_node"]) for place in found["places"]] == [
        *(("a100", node, node) for node in range(4)), *(("v100", node, node) for node in range(4, 8)),
    ]  # fmt: skip
    assert "pipeline ranks    0-3 on a100, nodes 0-3\n                  4-7 on v100, nodes 4-7\n" in shown
    assert "32 x a100-sxm-80gb and 32 x v100-sxm-32gb (a100-and-v100)" in shown
    assert "of 312 and 125 TFLOP/s on each device" in shown
    rooms = [place["device_memory_bytes"] / 1e9 for place in found["places"]]
    assert re.findall(r"^\d .* (85|34) +[0-9.,]+$", shown, flags=re.M) == [f"{room:.0f}" for room in rooms]
    layers = found["run"]["layers_by_stage"]
    on_a100, on_v100 = (sum(layers[rank] + layers[rank + 8] for rank in ranks) for ranks in (range(4), range(4, 8)))
    assert on_a100 + on_v100 == 32
    assert on_a100 > 1.5 * on_v100


def test_a_default_type_that_training_does_not_take_is_named(capsys, monkeypatch):
    shown = text(capsys, monkeypatch, "--machine.cluster", "dgx-a100")
    assert "without training.dtype train uses float32 for training.device cpu, simulate bfloat16" in shown
    for words in (["--training.device", "cuda"], ["--training.dtype", "bfloat16"]):
        assert answer(capsys, "--machine.cluster", "dgx-a100", *words)["may_differ"] is None


def test_the_rank_that_does_not_fit_its_own_kind_of_nodes_is_reported(capsys, monkeypatch):
    words = [*ON_BOTH, "--layout.microbatch-size", "8", "--data.seq-len", "1000"]
    found = answer(capsys, *words, status=1)
    totals = [memory["total_bytes"] for memory in found["memory"]]
    fullest = found["fullest_rank"]
    assert not found["fits"]
    assert fullest >= 4
    assert totals[fullest] < max(totals) < 85e9
    assert found["device_memory_bytes"] == 34e9
    shown = text(capsys, monkeypatch, *words, status=1)
    assert f"does not fit: pipeline rank {fullest} needs {totals[fullest] / 1e9:.1f} GB of 34" in shown


def test_more_devices_than_a_cluster_has_and_a_precision_that_a_kind_lacks_are_refused(capsys):
    message = refusal(capsys, *ON_BOTH, "--layout.dp", "8")
    assert "a100-and-v100 has 64 devices (4 x 8 a100, 4 x 8 v100), found a run on 128" in message
    assert "layout.pp 8 x layout.dp 8 x layout.tp 2" in message
    message = refusal(capsys, *ON_BOTH, "--training.dtype", "bfloat16")
    assert "training.dtype must be one that v100-sxm-32gb computes in: float32, float16, found bfloat16" in message
    assert answer(capsys, *ON_BOTH, "--layout.pp", "4", "--training.dtype", "bfloat16")["fits"]  # A100 alone


def test_a_cluster_of_one_kind_says_its_name_for_every_place(capsys):
    places = answer(capsys, GPT_52B)["places"]
    assert [place["first_node"] for place in places] == list(range(8))
    assert {place["kind"] for place in places} == {"dgx-1-v100"}


SMALL = ["--model.num-layers", "12", "--model.hidden-size", "64", "--model.num-heads", "2", "--data.seq-len", "64"]


@pytest.mark.parametrize("tied", [[], ["--model.tied"]], ids=["untied", "tied"])
def test_a_swap_plan_is_printed_although_the_given_cut_does_not_fit_and_its_own_cut_does(capsys, tied):
    words = [*SMALL, *tied, "--layout.pp", "1", "--layout.loops", "2", "--schedule.device-budget", "4MiB"]
    found = answer(capsys, *words, "--swap-plan", status=1)
    assert "stage 0 takes" in found["refused"]
    plan = found["swap_plan"]
    assert plan["is_needed"]
    assert sum(plan["partition"]) == 12 + 2
    sizes = ["--layout.num-microbatches", str(plan["num_microbatches"])]
    cut = ["--layout.loops", str(len(plan["partition"])), "--layout.partition", *map(str, plan["partition"])]
    step = answer(capsys, *words, *cut, *sizes, "--swap-plan")
    assert "refused" not in step
    assert step["swap_plan"] == plan
    assert main(["simulate", *words, "--swap-plan"]) == 1
    assert "as it is given    the device budget is 4.19 MB" in capsys.readouterr().out


def test_a_swap_plan_without_need_is_reported_as_such(capsys, monkeypatch):
    words = [*SMALL, "--layout.pp", "1", "--layout.loops", "2", "--schedule.device-budget", "4GiB", "--swap-plan"]
    assert "the whole model fits the budget: without one it trains faster" in text(capsys, monkeypatch, *words)


FASTER = "--machine.inter-bandwidth"


def test_another_bandwidth_changes_what_depends_on_it_and_is_compared_with_the_clusters_own(capsys, monkeypatch):
    own, fast, slow = (answer(capsys, GPT_52B, *change) for change in ((), (FASTER, "2x"), (FASTER, "0.5x")))
    assert fast["step_time_s"] < own["step_time_s"] < slow["step_time_s"]
    assert (own["own_step_time_s"], fast["own_step_time_s"]) == (None, own["step_time_s"])
    assert fast["cluster"] == "dgx-1-v100, inter bandwidth x 2"
    compute_s = [[one["compute_s"] for one in of["accounts"]] for of in (fast, own)]
    assert compute_s[0] == pytest.approx(compute_s[1])
    # The tensor axis is inside a node, and its exchanges are compute.
    inside = answer(capsys, GPT_52B, "--machine.intra-bandwidth", "2x")
    assert inside["accounts"][0]["compute_s"] < own["accounts"][0]["compute_s"]
    out = text(capsys, monkeypatch, GPT_52B, FASTER, "0.5x")
    own_ms = f"{own['step_time_s'] * 1e3:,.0f}"
    assert re.search(rf"a step, \+\d\.\d% of {own_ms} ms on dgx-1-v100 as it is\n", out)


def test_a_bandwidth_that_no_message_uses_or_that_cannot_be_is_refused(capsys):
    assert "the 4 devices of the run are in one node of laptop" in refusal(capsys, RUN, FASTER, "2x")
    both = refusal(capsys, RUN, FASTER, "0", "--machine.intra-bandwidth", "nan")
    wanted = "must be a factor such as 2x or 0.5x, or a number above 0 in GB/s, found"
    assert f"machine.inter_bandwidth {wanted} '0'" in both
    assert f"machine.intra_bandwidth {wanted} 'nan'" in both
    assert "use --machine.inter-bandwidth 2x" in refusal(capsys, RUN, "--inter-bandwidth", "2")


def test_the_copy_of_a_checkpoint_is_shown_beside_the_total(capsys):
    found = answer(capsys, RUN)
    assert min(found["checkpoint_copy_bytes"]) > 0
    assert main(["simulate", str(RUN)]) == 0
    assert " total copy\n" in capsys.readouterr().out
    assert main(["simulate", str(RUN), "--checkpoint.no-background"]) == 0
    assert "copy" not in capsys.readouterr().out
    assert set(answer(capsys, RUN, "--machine.software", "megatron-2021")["checkpoint_copy_bytes"]) == {0.0}


@pytest.mark.parametrize(("tp", "label"), [("8", "compute+tp "), ("1", "compute ")])
def test_compute_names_the_tensor_parallel_time_inside_it(capsys, monkeypatch, tp, label):
    status = 0 if tp == "8" else 1  # whole layers do not fit
    shown = text(capsys, monkeypatch, GPT_52B, "--layout.tp", tp, status=status)
    assert any(line.startswith(label) for line in shown.splitlines())
    assert ("tensor-parallel communication included" in shown) == (tp == "8")
