"""``pipeloom plan`` of run files: the written run is the planned one, train accepts it, and what is refused by name."""

import json

import pytest
from planned_model import MODEL

from pipeloom.cli import main
from pipeloom.config import find_problems
from pipeloom.predict.describe import load_run

RUN = (
    MODEL
    + """
layout.pp = 2
layout.dp = 2
machine.cluster = "dgx-h100"
"""
)


SWAPPED = """
layout.loops = 4
data.seq_len = 1024
schedule.device_budget = "30GB"
"""


@pytest.fixture
def planned(tmp_path, capsys):
    """Plan a run file with more lines and with flags -> exit status, the first layout, the written run, the errors."""

    def plan(lines="", *flags, run=RUN):
        file, folder = tmp_path / "run.toml", tmp_path / "planned"
        file.write_text(run + lines)
        status = main(["plan", str(file), "--no-explain", "--json", "--best", "1", "--out", str(folder), *flags])
        out, err = capsys.readouterr()
        layout = json.loads(out)["layouts"][0] if status == 0 else None
        return status, layout, folder / "run.toml", " ".join(err.split())

    return plan


@pytest.fixture
def simulated(capsys):
    """The step of a run file, in seconds."""

    def simulate(file):
        assert main(["simulate", str(file), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["step_time_s"]

    return simulate


def test_products_of_a_flag_are_those_of_the_written_run(planned, simulated):
    status, layout, file, err = planned("", "--for", "megatron", "--matmul-dtype", "float8")
    assert status == 0, err
    assert load_run(file).training.matmul_dtype == "float8"
    assert simulated(file) == pytest.approx(layout["step_time_s"])


@pytest.mark.parametrize("balance", ["", 'model.balance = "batch"\n'])
def test_experts_of_a_program_with_its_own_order_are_balanced_in_micro_batches(planned, simulated, balance):
    experts = "model.experts = 8\nmodel.experts_per_token = 2\n" + balance
    status, layout, file, err = planned(experts, "--for", "megatron", "--pp", "2")
    assert status == 0, err
    config = load_run(file)
    assert config.model.balance == "microbatch"
    assert simulated(file) == pytest.approx(layout["step_time_s"])


def test_the_model_of_pretrained_weights_is_planned(tmp_path, capsys, simulated):
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 32000, "hidden_act": "silu", **sizes})
    )
    file, folder = tmp_path / "run.toml", tmp_path / "planned"
    file.write_text('checkpoint.init = "hf"\nmachine.cluster = "dgx-a100"\nlayout.pp = 2\ndata.seq_len = 512\n')
    assert main(["plan", str(file), "--no-explain", "--json", "--out", str(folder)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["question"]["model"]["layers"] == 6
    assert simulated(folder / "run.toml") == pytest.approx(answer["layouts"][0]["step_time_s"])


def test_a_balance_that_a_run_file_names_stays(planned):
    for balance in ("none", "microbatch"):
        status, _, file, err = planned(f'model.experts = 8\nmodel.balance = "{balance}"\n', "--pp", "2")
        assert status == 0, err
        assert load_run(file).model.balance == balance
        file.unlink()


@pytest.mark.parametrize(
    "limits", [("--loops", "11"), ("--pp", "2", "--families", "1f1b", "--loops", "2"), ("--pp", "2", "--loops", "11")]
)
def test_stages_that_no_schedule_has_are_the_reason_not_the_batch_and_the_devices(planned, limits):
    status, _, _, err = planned("", *limits)
    assert status == 2
    assert "no family that is searched has a schedule with such stages" in err
    assert "instead of" not in err


@pytest.mark.parametrize("flag", ["--tp", "--cp", "--pp", "--dp", "--ep", "--loops", "--micro-batch"])
def test_a_limit_of_sizes_is_a_count(planned, flag):
    assert f"{flag} must be at least 1, found 0" in planned("", flag, "0")[3]


@pytest.mark.parametrize(
    ("lines", "flags", "problem"),
    [
        ("data.validation_fraction = 5.0", (), "data.validation_fraction must be at most 1, found 5.0"),
        ("optimizer.betas = [1.5, 0.9]", (), "optimizer.betas must be at least 0 and below 1"),
        ("adapter.alpha = 8.0", (), "adapter.alpha has no effect without adapter.rank"),
        ("optimizer.lr_wsd_decay_steps = 5", (), "has no effect without optimizer.lr_decay_style wsd"),
        ("machine.expert_load = 1.5", (), "machine.expert_load has no effect without model.experts"),
        ("training.divide_every = 5", (), "training.divide_every has no effect without layout.microbatches"),
        (
            "training.divide_every = 5\nlayout.microbatches = [8, 4]",
            (),
            "layout.microbatches: the search prices equal numbers of micro-batches",
        ),
        ("optimizer.wide_weights = false", (), "works with optimizer.name lomo and adalomo, found adamw"),
        (
            'optimizer.wide_weights = false\noptimizer.name = "lomo"',
            ("--dtype", "float32"),
            "optimizer.wide_weights false updates bfloat16 weights, found training.dtype float32",
        ),
        (
            'optimizer.wide_weights = false\noptimizer.name = "lomo"',
            ("--cluster", "laptop"),
            "optimizer.wide_weights false updates bfloat16 weights, found training.dtype float32",
        ),
        (
            "model.experts = 8",
            ("--matmul-dtype", "float8", "--for", "megatron"),
            "model.experts does not work with training.matmul_dtype float8",
        ),
    ],
)
def test_what_no_layout_mends_is_refused_before_the_search(planned, lines, flags, problem):
    status, _, file, err = planned(lines + "\n", *flags)
    assert (status, err.count(" - "), file.exists()) == (2, 1, False)
    assert problem in err


def test_what_a_layout_decides_is_no_problem_of_a_planned_run(planned):
    lines = """
layout.partition = [1, 2]
schedule.family = "zb-v"
schedule.gradient_buffers = 3
model.experts = 8
machine.expert_load = 1.5
optimizer.name = "lomo"
optimizer.wide_weights = false
"""
    status, _, file, err = planned(lines)
    assert status == 0, err
    assert find_problems(load_run(file), trains=False) == []


def test_the_model_of_a_flag_replaces_that_of_the_file_which_is_not_judged(planned):
    wrong = "model.ffn_size = 7\nmodel.num_kv_heads = 3\n"
    status, _, _, err = planned(wrong)
    assert status == 2
    assert "model.num_kv_heads" in err
    status, _, file, err = planned(wrong, "--model", "llama-3-8b", "--devices", "8")
    assert status == 0, err
    assert load_run(file).model.preset == "llama-3-8b"


def test_a_run_whose_stages_are_swapped_keeps_their_folder(planned, tmp_path):
    large = ["--model", "llama-13b", "--cluster", "dgx-a100", "--devices", "1"]
    batch = ["--global-batch", "2", "--micro-batch", "2", "--strategies", "swap"]
    status, _, file, err = planned(f'schedule.swap_folder = "{tmp_path / "stages"}"\n', *large, *batch, run=SWAPPED)
    assert status == 0, err
    schedule = load_run(file).schedule
    assert schedule.device_budget is not None
    assert schedule.swap_folder == tmp_path / "stages"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ('optimizer.name = "muon"\n', "optimizer.name muon"),
        ('optimizer.name = "lomo"\noptimizer.wide_weights = false\n', "optimizer.wide_weights false"),
        ('data.attention = "document"\n', "data.attention document"),
        ("model.density = 0.5\nmodel.density_block = 64\n", "model.density"),
    ],
)
def test_what_another_program_lacks_is_refused_as_simulate_refuses_it(planned, tmp_path, capsys, lines, name):
    lines += 'machine.software = "megatron-core"\n'
    status, _, file, err = planned(lines)
    assert (status, file.exists()) == (2, False)
    assert main(["simulate", str(tmp_path / "run.toml")]) == 2
    sentence = f"{name} needs machine.software pipeloom, found megatron-core"
    assert sentence in err
    assert sentence in " ".join(capsys.readouterr().err.split())
