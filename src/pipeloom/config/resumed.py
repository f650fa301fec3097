"""What a run that resumes from a checkpoint has of the run that wrote it: configuration, model, first weights."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeloom.checkpoint.checkpoint_folder import RUN_FILE, find_checkpoint, is_checkpoint, read_info, run_of, step_of
from pipeloom.config.file import read_run_file
from pipeloom.config.run import RunConfig
from pipeloom.config.sections import OutputConfig
from pipeloom.errors import UserError
from pipeloom.system.files import exists
from pipeloom.workload.model import ModelConfig

_ZEROS = "zeros"


def run_file_of(resume: Path) -> Path | None:
    """The run file of the run that ``checkpoint.resume`` names; ``None`` if it is gone, as that of a moved checkpoint.

    A run that resumes without a run file has it as its default: the checkpoint has no text, learning rate or seed.
    """
    with suppress(OSError):  # such as a name that is too long
        run = run_of(resume) if is_checkpoint(resume) else resume
        if run is not None and (run / RUN_FILE).is_file():
            return run / RUN_FILE
    return None


def model_in(checkpoint: Path) -> ModelConfig:
    """The model of a complete checkpoint, by its sizes.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return ModelConfig(**read_info(checkpoint).model)
    except TypeError as error:
        raise UserError(f"cannot read the model of {checkpoint}: {error}") from None


def resumed_model(config: RunConfig) -> ModelConfig | None:
    """The model of the checkpoint that a run resumes from, if the file of its sizes is gone; otherwise ``None``."""
    file, resume = config.model.file, config.checkpoint.resume
    if file is None or resume is None or exists(file):
        return None
    with suppress(UserError, OSError):  # reported elsewhere
        return replace(model_in(find_checkpoint(resume)), file=file)
    return None


def resumed_problems(config: RunConfig) -> list[str]:
    """A sentence for each such setting that is not that of the run that wrote the checkpoint.

    Equal ones are no problem: run files of runs contain them, and commands are repeated with a checkpoint added.
    """
    resume, init, second = config.checkpoint.resume, config.checkpoint.init, config.adapter.init
    if resume is None or (init is None and second is None):
        return []
    try:
        begun, begun_second = _first_weights(resume)
    except (UserError, OSError):  # reported elsewhere
        return []
    problems: list[str] = []
    if init is not None and not _is_same(init, begun):
        weights = "random weights" if begun is None else begun
        problems.append(
            f"checkpoint.init has no effect with checkpoint.resume {resume}, whose run began with {weights}, found "
            f"{init}; leave it out"
        )
    if second is not None and config.adapter.rank is not None and second != begun_second:
        problems.append(
            f"adapter.init has no effect with checkpoint.resume {resume}, whose run began with {begun_second}, found "
            f"{second}; leave it out"
        )
    return problems


def passed_problems(config: RunConfig) -> list[str]:
    """A sentence for each setting that names steps which a run that resumes does not have any more.

    Those of the run that wrote the checkpoint are no problem, as in ``resumed_problems``.
    """
    resume, own, steps = config.checkpoint.resume, config.output, config.training.known_steps
    if resume is None:
        return []
    try:
        checkpoint, file = find_checkpoint(resume), run_file_of(resume)
        earlier = OutputConfig() if file is None else read_run_file(file)[0].output
    except (UserError, OSError):  # reported elsewhere
        return []
    done = step_of(checkpoint) or 0
    passed = [step for step in own.profile or () if 1 <= step <= done]
    problems: list[str] = []
    if passed and own.profile != earlier.profile:
        problems.append(f"output.profile must be steps after {done}, the step of {checkpoint}, found {passed}")
    if 0 < steps - done < own.trace_step <= steps and own.trace_step not in (
        earlier.trace_step,
        OutputConfig.trace_step,
    ):
        left = f"{steps - done}, those from {checkpoint} to training.steps {steps}"
        problems.append(
            f"output.trace_step counts the steps of this run and must be at most {left}, found {own.trace_step}"
        )
    return problems


def _first_weights(resume: Path) -> tuple[Path | None, str]:
    """What the run of a checkpoint began with: ``checkpoint.init`` and ``adapter.init``."""
    if (file := run_file_of(resume)) is not None:
        config, _ = read_run_file(file)
        return config.checkpoint.init, config.adapter.init or _ZEROS
    info = read_info(find_checkpoint(resume))
    draws = info.adapter is not None and info.adapter.get("draws_second")
    return None if info.base is None else Path(info.base), "random" if draws else _ZEROS


def _is_same(init: Path, begun: Path | None) -> bool:
    """Whether both name the same weights: a run has the checkpoint of the run folder that it was given."""
    if begun is None:
        return False
    named = (begun, run_of(begun) or begun)
    return init.resolve() in {one.resolve() for one in named}
