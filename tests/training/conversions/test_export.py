"""Weights of a checkpoint as safetensors files."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_run import small_run

from pipeloom.checkpoint.checkpoint_folder import FOLDER, INFO, find_checkpoint, find_weights
from pipeloom.cli import main
from pipeloom.config import CheckpointConfig, RunConfig, TrainingConfig
from pipeloom.config.file import format_run
from pipeloom.config.tokenizer_files import tokenizer_files
from pipeloom.data.text import load_data
from pipeloom.errors import RunError, UserError
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.runs.run_folder import CONFIG, RunFolder
from pipeloom.system import folder_lock
from pipeloom.system.folder_lock import LOCK
from pipeloom.training.conversions.converted import existing, read_run
from pipeloom.training.conversions.export import export_weights
from pipeloom.training.session import resolve
from pipeloom.training.trainer import Trainer
from pipeloom.workload.layout import Layout


class Frozen(Trainer):
    """Trains nothing, so that what it saves is known."""

    def _step(self, step):
        found = super()._step(step)
        self.whole = {name: p.detach() for w in self._pipeline.data_parallel.weights.values()
                      for name, p in w.module.named_parameters()}  # fmt: skip
        return found


def _train(config, folder, rendezvous, rank, size):
    """Train a step; this rank's parameters after it, by name."""
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    data = load_data(config.data, 0)
    trainer = Frozen(resolve(config, data), world, data, RunFolder(folder))
    trainer.run()
    world.leave()
    return {name: tensor.numpy() for name, tensor in trainer.whole.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[object, dict[str, torch.Tensor]]:
    """A run folder with a checkpoint over two stages of two ranks, and its weights."""
    folder = tmp_path_factory.mktemp("exported")
    config = small_run(
        folder,
        layout=Layout(pp=2, loops=2, num_microbatches=2, microbatch_size=1),
        training=TrainingConfig(steps=1, validation_batches=0, sample_tokens=0, predict=False),
        checkpoint=CheckpointConfig(final="checkpoint"),
    )
    load_data(config.data, 0)
    run = folder / "run"
    run.mkdir()
    parts = run_workers(partial(_train, config, run), 2)
    return run, {name: torch.from_numpy(array) for part in parts for name, array in part.items()}


def test_a_small_model_is_one_file_with_every_parameter_whole(trained, tmp_path):
    run, expected = trained
    file, _ = export_weights(find_checkpoint(run), tmp_path / "new" / "folder")
    assert file == tmp_path / "new" / "folder" / "model.safetensors"
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    assert about["format"] == "pt"
    assert about["step"] == "1"
    assert json.loads(about["model"])["hidden_size"] == RunConfig().model.hidden_size // 12
    assert file.stat().st_mode == (tmp_path / "new").joinpath("folder").stat().st_mode & 0o666 | 0o100000


def test_a_checkpoint_is_no_place_for_an_export(trained):
    checkpoint = find_checkpoint(trained[0])
    before = sorted(checkpoint.parent.rglob("*"))
    for folder in (checkpoint, checkpoint / "new", checkpoint.parent / "new"):
        with pytest.raises(UserError, match=f"{folder} must be outside of"):
            export_weights(trained[0], folder)
        assert existing(folder)
    assert sorted(checkpoint.parent.rglob("*")) == before


def test_a_large_one_is_several_files_with_an_index(trained, tmp_path):
    run, expected = trained
    *files, tokenizer, index = export_weights(find_checkpoint(run), tmp_path, file_bytes=20_000)
    assert index.name == "model.safetensors.index.json"
    assert tokenizer.name == "tokenizer.json"
    assert [file.name for file in files[:2]] == [
        f"model-00001-of-{len(files):05}.safetensors",
        f"model-00002-of-{len(files):05}.safetensors",
    ]
    tree = json.loads(index.read_text())
    found = {}
    for file in files:
        tensors = load_file(file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 20_000 or len(tensors) == 1
        assert all(tree["weight_map"][name] == file.name for name in tensors)
        found |= tensors
    assert tree["weight_map"].keys() == found.keys() == expected.keys()
    assert tree["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_command_takes_a_run_and_another_type(trained, tmp_path, capsys):
    run, expected = trained
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == (
        f"checkpoint {run / FOLDER / 'step-000001'}\nweights    {tmp_path / 'out' / 'model.safetensors'}\n"
        f"tokenizer  {tmp_path / 'out' / 'tokenizer.json'}\n"
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)


def test_weights_that_are_there_are_not_written_over(trained, tmp_path, capsys):
    run, _ = trained
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"mine")
    assert main(["export", str(run), str(tmp_path)]) == 2
    assert "already has weights; choose another folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["model-00001-of-00002.safetensors"]


HOLD = """
import sys
import time
from pathlib import Path
from pipeloom.system.folder_lock import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_that_another_process_writes_to_is_refused(trained, tmp_path, capsys, monkeypatch):
    run, _ = trained
    monkeypatch.setattr(folder_lock.lock_folder, "__defaults__", (0.0,))
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            assert main(["export", str(run), str(tmp_path)]) == 2
            assert f"is in use by process {other.pid}" in capsys.readouterr().err
        finally:
            other.kill()
    assert {file.name for file in tmp_path.iterdir()} == {LOCK}
    assert main(["export", str(run), str(tmp_path)]) == 0


def test_a_run_stays_one_where_its_weights_were_exported_into_it(trained, tmp_path):
    run = shutil.copytree(trained[0], tmp_path / "run")
    export_weights(run, run, format="hf")
    assert find_weights(run) == run / FOLDER / "step-000001"
    shutil.rmtree(run / FOLDER)
    assert find_weights(run) == run


@pytest.mark.parametrize("more", [[], ["--file-gb", "0"]])
def test_what_is_no_checkpoint_and_what_is_no_size_are_one_message(tmp_path, capsys, more):
    assert main(["export", str(tmp_path), str(tmp_path / "out"), *more]) == 2
    words = "--file-gb must be above 0, found 0" if more else "found no complete checkpoint in"
    assert words in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_message(trained, tmp_path, capsys):
    run, _ = trained
    (tmp_path / "file").write_text("")
    assert main(["export", str(run), str(tmp_path / "file" / "out")]) == 2
    assert f"{tmp_path / 'file'} is not a folder" in capsys.readouterr().err


def test_two_exports_are_equal_in_every_byte(trained, tmp_path):
    contents = []
    for number in range(6):  # the library's order of three entries is random
        files = export_weights(find_checkpoint(trained[0]), tmp_path / f"{number}", file_bytes=20_000)
        contents.append({file.name: file.read_bytes() for file in files})
    assert all(one == contents[0] for one in contents)
    with safe_open(tmp_path / "0" / min(contents[0]), "pt") as opened:
        assert opened.metadata().keys() == {"format", "step", "model"}


def test_bytes_can_be_decoded_by_whoever_has_the_export_alone(trained, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    export_weights(find_checkpoint(trained[0]), tmp_path)
    found = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "naïve 狐 🦊\r\n\t  two  spaces\x00\x7f\x85"
    assert found.encode(text).ids == list(text.encode())
    assert found.decode([*text.encode(), 256]) == text
    assert found.get_vocab_size() == 257


def test_another_tokenizer_in_the_folder_is_not_replaced(trained, tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text("mine")
    assert main(["export", str(trained[0]), str(tmp_path)]) == 2
    assert "tokenizer.json is another tokenizer; choose another folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    (tmp_path / "tokenizer.json").write_text((trained[0] / "tokenizer.json").read_text())
    assert [file.name for file in export_weights(find_checkpoint(trained[0]), tmp_path)] == ["model.safetensors"]


@pytest.fixture
def full_disk(monkeypatch):
    """Files of more than 16 KiB cannot be written; the system's own error for it."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("more", [[], ["--file-gb", "0.00002"]])
def test_a_disk_that_is_full_is_one_message_and_nothing_is_left(trained, tmp_path, capsys, full_disk, more):
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "new" / "folder", tmp_path / "there"):
        assert main(["export", str(trained[0]), str(out), *more]) == 1
        assert (
            capsys.readouterr().err == f"pipeloom export: cannot write weights to {out}: File too large (os error 27)\n"
        )
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_weights_that_cannot_fit_are_refused_before_they_are_written(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    assert main(["export", str(trained[0]), str(tmp_path / "out")]) == 1
    assert re.search(
        r"cannot write weights to .*out: they have [\d,]+ bytes, 5 are free there", capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupt_at_any_file_leaves_nothing(trained, tmp_path, monkeypatch, error):
    """Also while the files get their names: a few of several files of weights must not stay."""
    honest = Path.replace
    num_files = len(export_weights(find_checkpoint(trained[0]), tmp_path / "whole", file_bytes=20_000))
    for number in range(num_files):
        places = iter(range(num_files))

        def replace(self, target, places=places, number=number):
            if next(places) == number:
                raise error
            return honest(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        with pytest.raises((KeyboardInterrupt, RunError)):
            export_weights(find_checkpoint(trained[0]), tmp_path / "out", file_bytes=20_000)
        assert [file.name for file in tmp_path.iterdir()] == ["whole"]


def test_the_index_gets_its_name_last(trained, tmp_path, monkeypatch):
    order, honest = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: order.append(self.name) or honest(self, target))
    export_weights(find_checkpoint(trained[0]), tmp_path, file_bytes=20_000)
    assert order[-1] == "model.safetensors.index.json"
    assert sorted(order) == sorted(file.name for file in tmp_path.iterdir())


def test_what_a_killed_export_left_is_cleared(trained, tmp_path):
    (tmp_path / ".weights.part").mkdir()
    (tmp_path / ".weights.part" / "model.safetensors").write_bytes(b"half")
    files = export_weights(find_checkpoint(trained[0]), tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(files)


def copied(run, folder):
    """A copy of the checkpoint of a run."""
    return Path(shutil.copytree(find_checkpoint(run), folder / "copy"))


def test_any_damaged_file_is_refused_by_name_and_nothing_is_written(trained, tmp_path, capsys):
    path = copied(trained[0], tmp_path)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        middle = len(whole) // 2
        file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        assert main(["export", str(path), str(tmp_path / "out")]) == 2
        words = capsys.readouterr().err
        assert str(file) in words
        assert words.count("was changed after it was written") == 1 or file.name == INFO  # that may be no JSON any more
        file.write_bytes(whole)
    (path / "__0_0.distcp").unlink()
    assert main(["export", str(path), str(tmp_path / "out")]) == 2
    assert "__0_0.distcp is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_newest_undamaged_checkpoint_of_a_run_is_exported_with_a_remark(trained, tmp_path, capsys):
    run, expected = trained
    whole, newer = (tmp_path / "run" / FOLDER / f"step-00000{step}" for step in (1, 2))
    for one in (whole, newer):
        shutil.copytree(find_checkpoint(run), one)
    file = newer / "__0_0.distcp"
    parts = bytearray(file.read_bytes())
    parts[len(parts) // 2] ^= 1
    file.write_bytes(parts)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"checkpoint {whole}\n")
    assert printed.err.startswith("not from step-000002: ")
    assert "was changed after it was written" in printed.err
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == expected.keys()
    export_weights(tmp_path / "run", tmp_path / "other")
    (tmp_path / "run" / CONFIG).write_text(format_run(RunConfig()))
    assert read_run(tmp_path / "run").checkpoint == whole
    assert capsys.readouterr().err.count("not from step-000002: ") == 2


def without_hashes(path):
    """Make a checkpoint one of the format that had none."""
    tree = json.loads((path / INFO).read_text())
    (path / INFO).write_text(
        json.dumps({key: tree[key] for key in tree if key not in ("files", "sha256")} | {"format": 1})
    )


def test_a_checkpoint_without_hashes_is_exported_with_a_remark(trained, tmp_path, capsys):
    path = copied(trained[0], tmp_path)
    without_hashes(path)
    assert main(["export", str(path), str(tmp_path / "out")]) == 0
    remark = "written without hashes of its files, so damage cannot be detected"
    assert f"checkpoint {path} ({remark})\n" in capsys.readouterr().out
    (path / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"cannot read the checkpoint .*copy: it lacks __0_0\.distcp"):
        export_weights(path, tmp_path / "other")


def test_a_checkpoint_that_would_run_code_is_refused(trained, tmp_path, capsys):
    path = copied(trained[0], tmp_path)
    without_hashes(path)
    (path / ".metadata").write_bytes(b"cos\nmkdir\n(V" + str(tmp_path / "made").encode() + b"\ntR.")
    assert main(["export", str(path), str(tmp_path / "out")]) == 2
    assert ".metadata refers to os.mkdir, which no checkpoint needs" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy"]


def test_the_end_of_text_of_an_own_tokenizer_is_that_of_the_model_for_transformers(trained, tmp_path):
    files = {file.name for file in export_weights(find_checkpoint(trained[0]), tmp_path, format="hf")}
    assert {"tokenizer.json", "tokenizer_config.json"} <= files
    end = json.loads((tmp_path / "config.json").read_text())["eos_token_id"]
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id == end
    # A run takes it as its tokenizer.
    assert json.loads(tokenizer_files(tmp_path)["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"


def test_the_model_file_of_a_run_has_the_tokens_of_its_tokenizer(trained, tmp_path):
    """Without them, transformers takes those of the architecture's defaults, 1 and 2 for Llama."""
    export_weights(find_checkpoint(trained[0]), tmp_path, format="hf")
    found = json.loads((tmp_path / "config.json").read_text())
    assert (found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (None, 256, None)
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config.eos_token_id == 256
