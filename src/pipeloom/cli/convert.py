"""``pipeloom convert``: another model from the weights of trained ones."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeloom.cli.flags import SOURCE, read_flags
from pipeloom.cli.reference import Command, Output, Place
from pipeloom.errors import ConfigError
from pipeloom.workload.limits import Common, Count, Limits, Positive


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom convert``.

    upcycle copies each feed-forward block of a dense run into experts; its run file starts from these weights, without
    optimizer state. delink gives each layer of a run with model.share_layers its own copy of the weights and of the
    optimizer's state, divided among the layers; its run file resumes the run. densify makes dense matrices of those of
    which blocks are kept (model.density), with zeros elsewhere; its run file resumes the run. These compute what the
    old model did. merge adds up what several runs learned from one base; its run file starts from these weights.
    """

    how: Annotated[Literal["upcycle", "delink", "densify", "merge"], Place("HOW")]
    """What is made. upcycle: a model with experts. delink: a model whose layers share nothing. densify: a model of
    dense matrices. merge: one model of several."""
    run: Annotated[Path, Place("RUN")]
    """A run folder, for its newest checkpoint, or a checkpoint of one; with merge the base of the models, which may be
    a Hugging Face folder."""
    output: Annotated[Path, Place("FOLDER"), Output("folder")]
    """New folder with a run file and a checkpoint."""
    experts: Common[Annotated[int, Limits(least=2)] | None] = None
    """upcycle: experts of a layer. None: 8."""
    experts_per_token: Common[Count | None] = None
    """upcycle: experts that each token takes. None: 2."""
    expert_every: Common[Count | None] = None
    """upcycle: every layer of this number has experts, and the others keep their block. None: every layer."""
    models: Common[tuple[Path, ...] | None] = None
    """merge: run folders or checkpoints of runs that were trained from RUN, and Hugging Face folders of its model."""
    method: Common[Literal["arithmetic", "pwe"] | None] = None
    """merge: arithmetic adds the models' weighted differences from the base. pwe: blocks have weights that routers
    return for a preference. None: arithmetic."""
    weights: Common[tuple[float, ...] | None] = None
    """merge: of each model's difference from the base; with pwe that of parameters without a router, and of the others
    before training. None: equal ones that add up to 1; with pwe blocks begin with the preference."""
    preference: Common[tuple[float, ...] | None] = None
    """merge with pwe: how much the text of each model counts; adds up to 1."""
    routers: Path | None = None
    """merge with pwe: folder of an earlier merge of these runs, whose routers are taken. None: they are trained, in the
    processes of RUN."""
    routed: Literal["feed-forward", "all"] | None = None
    """merge with pwe: what has routers. all: attention, embedding and head, too. None: feed-forward."""
    router_steps: Count | None = None
    """merge with pwe: steps of training routers. None: 400."""
    router_lr: Positive | None = None
    """merge with pwe: learning rate of routers. None: 0.01."""


COMMAND = Command(
    name="convert",
    options=Options,
    examples={
        "pipeloom convert upcycle outputs/demo outputs/experts --experts 4": "copies of each block as experts",
        "pipeloom convert delink outputs/shared outputs/own": "a copy for each layer that shared its weights",
        "pipeloom convert densify outputs/sparse outputs/dense": "all matrices dense, to train on",
        "pipeloom convert merge outputs/base outputs/both --models outputs/a outputs/b": "what two runs learned",
    },
)
_UPCYCLE = ("experts", "experts_per_token", "expert_every")
_MERGE = ("models", "method", "weights")
_TRAINED = ("routed", "router_steps", "router_lr")
_PREFERRED = ("preference", "routers", *_TRAINED)


def run(words: list[str]) -> int:
    """Parse the arguments, write the folder, print its paths."""
    options, problems = read_flags(COMMAND, words)
    problems += _unused(options)
    if options.how == "merge" and options.models is None:
        problems.append("--models is missing: the runs that merge adds up")
    if options.method == "pwe" and options.preference is None:
        problems.append("--preference is missing: how much the text of each model counts, such as 0.7 0.3")
    if problems:
        raise ConfigError(problems, SOURCE)

    from pipeloom.runs.run_folder import CONFIG

    print(f"checkpoint {_HOW[options.how](options)}\nrun file   {options.output / CONFIG}")
    return 0


def _unused(options: Options) -> list[str]:
    """A sentence for each option that has no effect."""
    used = {"upcycle": _UPCYCLE, "merge": _MERGE}.get(options.how, ())
    what = options.how
    if options.how == "merge":
        what = f"merge --method {options.method or 'arithmetic'}"
        if options.method == "pwe" and options.routers is None:
            used = (*_MERGE, *_PREFERRED)
        elif options.method == "pwe":
            used, what = ("models", "method", "preference", "routers"), f"{what} --routers"
    given = [name for name in (*_UPCYCLE, *_MERGE, *_PREFERRED) if getattr(options, name) is not None]
    return [f"--{name.replace('_', '-')} has no effect with {what}; leave it out" for name in given if name not in used]


def _upcycle(options: Options) -> Path:
    from pipeloom.training.conversions.upcycle import upcycle

    return upcycle(
        options.run,
        options.output,
        experts=options.experts or 8,
        experts_per_token=options.experts_per_token or 2,
        expert_every=options.expert_every or 1,
    )


def _delink(options: Options) -> Path:
    from pipeloom.training.conversions.delink import delink

    return delink(options.run, options.output)


def _densify(options: Options) -> Path:
    from pipeloom.training.conversions.densify import densify

    return densify(options.run, options.output)


def _merge(options: Options) -> Path:
    from pipeloom.training.conversions.merge import ROUTER_LR, ROUTER_STEPS, merge, merge_preferred

    models = options.models or ()
    if options.preference is None:
        return merge(options.run, options.output, models, options.weights)
    return merge_preferred(
        options.run,
        options.output,
        models,
        options.preference,
        weights=options.weights,
        routers=options.routers,
        routed=options.routed or "feed-forward",
        steps=options.router_steps or ROUTER_STEPS,
        lr=options.router_lr or ROUTER_LR,
    )


_HOW: dict[str, Callable[[Options], Path]] = {
    "upcycle": _upcycle,
    "delink": _delink,
    "densify": _densify,
    "merge": _merge,
}
