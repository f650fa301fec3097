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

    upcycle copies each feed-forward block of a dense run into experts; its run file starts from these weights, without
    optimizer state. delink gives each layer of a run with model.share_layers its own copy of the weights and of the
    optimizer's state, divided among the layers; its run file goes on. densify makes dense matrices of those of which
    blocks are kept (model.density), with zeros elsewhere; its run file goes on. The new model computes what the old one
    did.
    """

    how: Annotated[Literal["upcycle", "delink", "densify"], Place("HOW")]
    """What is made. upcycle: a model with experts. delink: a model whose layers share nothing. densify: a model of
    dense matrices."""
    run: Annotated[Path, Place("RUN")]
    """A run folder, for its newest checkpoint, or a checkpoint of one."""
    output: Annotated[Path, Place("FOLDER"), Output("folder")]
    """New folder with a run file and a checkpoint."""
    experts: Common[Annotated[int, Limits(least=2)] | None] = None
    """upcycle: experts of a layer. None: 8."""
    experts_per_token: Common[Count | None] = None
    """upcycle: experts that each token takes. None: 2."""
    expert_every: Common[Count | None] = None
    """upcycle: every layer of this number has experts, and the others keep their block. None: every layer."""


COMMAND = Command(
    name="convert",
    options=Options,
    examples={
        "pipeloom convert upcycle outputs/demo outputs/experts --experts 4": "copies of each block as experts",
        "pipeloom convert delink outputs/shared outputs/own": "a copy for each layer that shared its weights",
        "pipeloom convert densify outputs/sparse outputs/dense": "all matrices dense, to train on",
    },
)


def run(words: list[str]) -> int:
    """Parse the arguments, write the folder, print its paths."""
    options, problems = read_flags(COMMAND, words)
    if not problems and options.how != "upcycle":
        given = [
            name for name in ("experts", "experts_per_token", "expert_every") if getattr(options, name) is not None
        ]
        problems = [f"--{name.replace('_', '-')} has no effect with {options.how}; leave it out" for name in given]
    if problems:
        raise ConfigError(problems, SOURCE)

    from pipeloom.runs.run_folder import CONFIG
    from pipeloom.training.delink import delink
    from pipeloom.training.densify import densify
    from pipeloom.training.upcycle import upcycle

    if options.how == "delink":
        found = delink(options.run, options.output)
    elif options.how == "densify":
        found = densify(options.run, options.output)
    else:
        found = upcycle(
            options.run,
            options.output,
            experts=options.experts or 8,
            experts_per_token=options.experts_per_token or 2,
            expert_every=options.expert_every or 1,
        )
    print(f"checkpoint {found}\nrun file   {options.output / CONFIG}")
    return 0
