"""``pipeloom launch`` as a person sees it."""

from pathlib import Path

import pytest

from pipeloom.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def launch(capsys, *words):
    status = main(["launch", *map(str, words)])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_the_example_of_52_billion_parameters(tmp_path, capsys):
    status, output, _ = launch(capsys, EXAMPLES / "gpt-52b-64-v100.toml", "--out", tmp_path)
    assert status == 0
    assert "torchtitan: torchtitan 0.3.0 cannot express this run" in output
    assert "megatron: Megatron-LM with Megatron Core 0.16\n" in output
    words = (tmp_path / "megatron.sh").read_text()
    assert "--pipeline-model-parallel-size 8" in words
    assert "--tensor-model-parallel-size 8" in words
    assert output.count("model.tied: the first and the last stage hold") == 1


def test_flags_override_the_file_and_only_the_chosen_programs_files_are_written(tmp_path, capsys):
    words = (EXAMPLES / "run.toml", "--out", tmp_path, "--to", "torchrun", "slurm", "--layout.loops", "2",
             "--time-limit", "2-12")  # fmt: skip
    status, output, _ = launch(capsys, *words)
    assert status == 0
    assert {file.name for file in tmp_path.iterdir()} == {"torchrun.toml", "torchrun.sh", "pipeloom.sbatch"}
    assert "loops = 2" in (tmp_path / "torchrun.toml").read_text()
    assert "--time=2-12" in (tmp_path / "pipeloom.sbatch").read_text()
    assert "megatron" not in output.replace("SCRIPT=megatron.sh", "")


def test_a_chosen_program_that_refuses_the_run_is_an_error(tmp_path, capsys):
    words = (EXAMPLES / "run.toml", "--out", tmp_path, "--to", "torch", "megatron", "--schedule.placement", "v")
    status, output, _ = launch(capsys, *words)
    assert status == 2
    assert "reason    schedule.placement v" in output
    assert {file.name for file in tmp_path.iterdir()} == {"torch_schedule.csv", "torch_schedule.py"}


def test_files_that_start_nothing_are_an_error_where_all_that_start_are_refused(tmp_path, capsys):
    # 12 processes do not fill nodes of 8: PyTorch's CSV has the order of one pipeline, and starts nothing.
    words = (EXAMPLES / "run.toml", "--out", tmp_path, "--layout.dp", "3", "--machine.cluster", "dgx-a100")
    status, output, _ = launch(capsys, *words)
    assert status == 2
    assert output.count("cannot express this run") == 4
    assert {file.name for file in tmp_path.iterdir()} == {"torch_schedule.csv", "torch_schedule.py"}


@pytest.mark.parametrize(("ranks", "needs"), [("2", 1), ("16", 0)])
def test_a_run_that_is_predicted_not_to_fit_is_written_and_said_to_lack_memory(tmp_path, capsys, ranks, needs):
    words = ("--model.preset", "llama-3-8b", "--layout.pp", ranks, "--layout.num-microbatches", "16",
             "--machine.cluster", "dgx-a100", "--training.device", "cuda")  # fmt: skip
    status, output, _ = launch(capsys, "--out", tmp_path, "--to", "torchrun", "slurm", *words)
    assert status == 0
    printed = " ".join(output.split())
    assert printed.count("does not fit pipeline rank 0 needs") == needs
    assert ("GB of 85, as predicted for machine.software pipeloom" in printed) == bool(needs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--out FOLDER is missing"),
        (("--out", "x", "--machine.cluster", "nowhere"), "nowhere"),
        (("--out", "x", "--time-limit", "soon"), "the time limit must be like"),
        (("--out", "x", "--name", 'a: "b"'), "the name of the job must be"),
    ],
)
def test_mistakes_are_one_message(capsys, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, error = launch(capsys, EXAMPLES / "run.toml", *words)
    assert status == 2
    assert message in error
    assert not list(tmp_path.iterdir())
