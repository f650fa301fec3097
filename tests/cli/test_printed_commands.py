"""Commands that are printed can be pasted, wherever their files are."""

import re
import shlex
from types import SimpleNamespace

import pytest
from run_files import write_run

from pipeloom import load_cluster, load_run
from pipeloom.cli import main, train
from pipeloom.cli.launch import print_run
from pipeloom.errors import UserError
from pipeloom.runs.run_folder import CONFIG
from pipeloom.runs.run_start import take_run_folder
from pipeloom.training.checkpoints import contents


@pytest.fixture
def folder(tmp_path):
    """A folder whose name has a space, a quote and a variable of the shell."""
    path = tmp_path / "it's my $HOME"
    path.mkdir()
    return path


def printed(text, begin):
    """The words of the command that begins with these."""
    return shlex.split(re.search(rf"{begin}[^`\n]*", text)[0])


def test_train_prints_how_a_run_goes_on(folder, capsys, monkeypatch):
    monkeypatch.setattr(train, "_results", lambda *_: {})
    train._print_end(SimpleNamespace(num_parameters=1), write_run(folder))
    shown = " ".join(capsys.readouterr().out.split())
    assert printed(shown, "pipeloom train [^-]") == ["pipeloom", "train", str(folder / CONFIG)]


def test_tokenize_prints_how_to_train(folder, capsys):
    (folder / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 99)
    assert main(["tokenize", str(folder / "text.txt"), str(folder / "tokens"), "--tokenizer", "bytes"]) == 0
    flags = ["--data.path", str(folder / "tokens"), "--data.tokenizer", "bytes"]
    assert printed(capsys.readouterr().out, "--data.path") == flags


def test_launch_prints_the_start(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # no line breaks a path
    print_run(load_run(layout={"pp": 2}), load_cluster("laptop"), folder / "run.toml")
    assert printed(capsys.readouterr().out, "pipeloom train")[:3] == ["pipeloom", "train", str(folder / "run.toml")]


def test_schedule_names_the_flag_of_a_run_file(folder, capsys):
    assert main(["schedule", str(folder / "run.toml")]) == 2
    assert printed(capsys.readouterr().err, "--run") == ["--run", str(folder / "run.toml")]


def test_a_checkpoint_of_another_model_has_the_command_of_its_own(folder, monkeypatch):
    run = write_run(folder)
    checkpoint = run / "checkpoints" / "step-000003"
    monkeypatch.setattr(contents, "read_info", lambda _: SimpleNamespace(model={}, adapter=None))
    monkeypatch.setattr(contents, "other_settings", lambda *_: ["model.num_layers is 4, the checkpoint has 2"])
    with pytest.raises(UserError) as refused:
        contents._refuse_other_model(load_run(), checkpoint, {}, {}, "--checkpoint.resume")
    words = ["pipeloom", "train", str(run / CONFIG), "--checkpoint.resume", str(checkpoint)]
    assert printed(str(refused.value), "pipeloom train") == words


def test_a_folder_with_a_run_has_the_flag_that_goes_on(folder):
    config = load_run(output={"folder": write_run(folder)})
    with pytest.raises(UserError) as refused, take_run_folder(config):
        pass
    assert printed(str(refused.value).replace(" to resume it", "\n"), "--checkpoint.resume")[1] == str(folder)
