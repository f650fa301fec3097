"""What a resumed run has of the run that wrote its checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import info_of

from pipeloom import load_run
from pipeloom.checkpoint.checkpoint_folder import FOLDER, METADATA, RUN_FILE, measure, name_of, write_info
from pipeloom.cli import evaluate
from pipeloom.cli.run_config import parse_config
from pipeloom.config.file import format_run
from pipeloom.errors import ConfigError
from pipeloom.predict.describe import completed
from pipeloom.workload.model import model_settings


def begin(tmp_path: Path, **model: Any) -> tuple[Path, Path]:
    """A run folder with a checkpoint, and the file that its model is from; ``model`` changes settings of it."""
    file = tmp_path / "model.toml"
    file.write_text(
        'name = "small"\nfamily = "llama"\ntied = false\n'
        "layers = 3\nhidden = 32\nheads = 4\nkv_heads = 2\nffn = 64\nvocab = 300\n"
    )
    config = load_run(model={"file": str(file)}, layout={"pp": 2})
    config = replace(config, model=replace(config.model, **model))
    run = tmp_path / "run"
    checkpoint = run / FOLDER / name_of(4)
    checkpoint.mkdir(parents=True)
    (checkpoint / METADATA).write_bytes(b"nothing")
    write_info(checkpoint, replace(info_of(4), model=model_settings(config.model)), measure([checkpoint / METADATA]))
    (run / RUN_FILE).write_text(format_run(config))
    return run, file


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, Path]:
    return begin(tmp_path)


def test_a_resumed_run_needs_the_file_of_its_model_no_more(begun: tuple[Path, Path]) -> None:
    run, file = begun
    before = load_run(checkpoint={"resume": str(run)})
    file.rename(file.with_name("moved.toml"))
    after = load_run(checkpoint={"resume": str(run)})
    assert after == before
    assert completed(after, lambda config, is_model_known: []) == (after, [])
    with pytest.raises(ConfigError, match="there is no model"):
        load_run(run / RUN_FILE)


def test_sizes_that_differ_from_the_checkpoint_are_named_without_the_file(begun: tuple[Path, Path]) -> None:
    run, file = begun
    file.unlink()
    with pytest.raises(ConfigError, match=r"model\.num_layers must be 3, as in checkpoint\.resume .*, found 6"):
        load_run(checkpoint={"resume": str(run)}, model={"num_layers": 6})


@pytest.mark.parametrize("adapted", [None, '{"model_type": "gpt_neox"}'])
def test_a_trained_model_is_evaluated_without_the_file_of_its_sizes(tmp_path: Path, adapted: str | None) -> None:
    run, file = begin(tmp_path, adapted=adapted)
    file.unlink()
    model = parse_config(evaluate.COMMAND, [str(run)]).model
    assert (model.num_layers, model.vocab_size, model.adapted) == (3, 300, adapted)


def test_steps_that_a_resumed_run_has_behind_it_are_refused_unless_they_are_its_own(begun: tuple[Path, Path]) -> None:
    run, _ = begun
    resume, steps = {"resume": str(run)}, {"steps": 6}
    with pytest.raises(ConfigError) as caught:
        load_run(checkpoint=resume, training=steps, output={"profile": [2, 4, 5], "trace_step": 5})
    checkpoint = run / FOLDER / name_of(4)
    profile, trace_step = caught.value.problems
    assert profile == f"output.profile must be steps after 4, the step of {checkpoint}, found [2, 4]"
    assert trace_step == (
        f"output.trace_step counts the steps of this run and must be at most 2, those from {checkpoint} to "
        "training.steps 6, found 5"
    )
    file = run / RUN_FILE
    file.write_text(file.read_text().replace("trace_step = 10", "trace_step = 5\nprofile = [2, 4, 5]"))
    assert load_run(checkpoint=resume, training=steps).output.profile == (2, 4, 5)
    load_run(checkpoint=resume, training=steps, output={"profile": [5], "trace_step": 2})
