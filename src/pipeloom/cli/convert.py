"""``pipeloom convert``: another model from the weights of a trained one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeloom.cli.flags import SOURCE, read_flags
from pipeloom.cli.reference import Command, Output, Place
from pipeloom.errors import ConfigError
from pipeloom.workload.limits import Common, Count, Limits


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom convert``.

    upcycle copies each feed-forward block of a dense run into experts. The new model computes what the old one did, and
    its run file starts from these weights, without optimizer state.
    """

    how: Annotated[Literal["upcycle"], Place("HOW")]
    """What is made. upcycle: a model with experts."""
    run: Annotated[Path, Place("RUN")]
    """A run folder, for its newest checkpoint."""
    output: Annotated[Path, Place("FOLDER"), Output("folder")]
    """New folder with a run file and a checkpoint."""
    experts: Common[Annotated[int, Limits(least=2)]] = 8
    """Experts of a layer."""
    experts_per_token: Common[Count] = 2
    """Experts that each token takes."""
    expert_every: Common[Count] = 1
    """Every layer of this number has experts, and the others keep their block."""


COMMAND = Command(
    name="convert",
    options=Options,
    examples={
        "pipeloom convert upcycle outputs/demo outputs/experts --experts 4": "copies of each block as experts",
    },
)


def run(words: list[str]) -> int:
    """Parse the arguments, write the folder, print its paths."""
    options, problems = read_flags(COMMAND, words)
    if problems:
        raise ConfigError(problems, SOURCE)

    from pipeloom.runs.run_folder import CONFIG
    from pipeloom.training.upcycle import upcycle

    found = upcycle(
        options.run,
        options.output,
        experts=options.experts,
        experts_per_token=options.experts_per_token,
        expert_every=options.expert_every,
    )
    print(f"checkpoint {found}\nrun file   {options.output / CONFIG}")
    return 0
