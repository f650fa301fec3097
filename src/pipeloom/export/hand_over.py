"""Writing of a run's start files, or of the reasons why a program cannot start it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeloom.config import RunConfig, usual_values
from pipeloom.cost.hardware import Cluster
from pipeloom.errors import UserError
from pipeloom.export import kubeflow, megatron, skypilot, slurm, torch_schedule, torchrun, torchtitan
from pipeloom.export.job import Draft, Job, Site, Target, make_job
from pipeloom.export.text import MARK
from pipeloom.system.files import replaced

_ALL = (
    torchrun.TARGET,
    slurm.TARGET,
    kubeflow.TARGET,
    skypilot.TARGET,
    torch_schedule.TARGET,
    torchtitan.TARGET,
    megatron.TARGET,
)
TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
"""Targets of an export by name."""

_TIME = re.compile(r"(\d+-\d{1,2}(:\d{2}){0,2}|\d+|\d+:\d{2}(:\d{2})?)")
"""The formats of ``sbatch --time``: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""A DNS label that leaves room for what Kubernetes appends to the name of a job."""
_VOLUME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?:(/[A-Za-z0-9._-]+)+")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


@dataclass(frozen=True)
class Written:
    """A target with its files.

    Attributes:
        target: the target.
        files: the files that were written.
        notes: start command, differences, variables that the user must set.
    """

    target: Target
    files: tuple[Path, ...]
    notes: Draft


@dataclass(frozen=True)
class Refused:
    """A target that cannot express the run.

    Attributes:
        target: the target.
        reasons: all reasons, a sentence each.
    """

    target: Target
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class HandedOver:
    """The result of an export.

    Attributes:
        folder: of the files.
        written: targets with files.
        refused: targets that cannot express the run.
        usual: a sentence with settings that are defaults, not the model's recipe; ``None`` for no such.
        misfit: which rank is predicted to need more memory than its devices have; ``None`` for none.
        recipe: sentences on the recipe of the model; empty without one.
    """

    folder: Path
    written: tuple[Written, ...]
    refused: tuple[Refused, ...]
    usual: str | None = None
    recipe: tuple[str, ...] = ()
    misfit: str | None = None


def hand_over(
    config: RunConfig, cluster: Cluster, folder: Path, targets: Sequence[str] = (), *, site: Site | None = None
) -> HandedOver:
    """Write the start files of a run for each target that can express it.

    Files of an earlier call for these targets are replaced, or removed if the target refuses the run now.

    Args:
        config: the run.
        cluster: where it runs.
        folder: of the files; created if it does not exist.
        targets: keys of ``TARGETS``; empty for all, without those that need an image where there is none.
        site: names for schedulers.

    Raises:
        ConfigError: the configuration is wrong; has all problems.
        UserError: a target is unknown, a name of the site is not one, or the folder cannot be written to.
    """
    unknown = [name for name in targets if name not in TARGETS]
    if unknown:
        raise UserError(f"there is no target {', '.join(unknown)}; known: {', '.join(TARGETS)}")
    site = site or Site()
    _check(site)
    job = make_job(config, cluster, site)
    chosen = _chosen(targets, site)
    refused = _refused(chosen, job)
    refusing = [one.target for one in refused]
    drafts = [(target, target.make(job)) for target in chosen if target not in refusing]
    texts = {name: text for _, draft in drafts for name, text in draft.files.items()}
    # A script of an earlier call would start a run that the target refuses now.
    stale = {name for target in chosen for name in target.files} - set(texts)
    _write(folder, texts, stale)
    written = tuple(Written(target, tuple(folder / name for name in draft.files), draft) for target, draft in drafts)
    return HandedOver(folder, written, refused, usual_values(job.config), job.recipe, job.misfit if written else None)


def starting(config: RunConfig, cluster: Cluster, targets: Sequence[str] = ()) -> list[Target]:
    """Those targets of ``hand_over`` that can express a run, and whose files start it; nothing is written.

    Raises:
        ConfigError: the configuration is wrong; has all problems.
    """
    chosen = _chosen(targets, Site())
    refusing = [one.target for one in _refused(chosen, make_job(config, cluster, Site()))]
    return [target for target in chosen if target.starts and target not in refusing]


def usual_targets(site: Site) -> list[str]:
    """The targets where none is named: all, without those that need an image where there is none."""
    return [name for name, target in TARGETS.items() if site.image or not target.needs_image]


def _chosen(targets: Sequence[str], site: Site) -> list[Target]:
    return [TARGETS[name] for name in dict.fromkeys(targets or usual_targets(site))]


def _refused(chosen: Sequence[Target], job: Job) -> tuple[Refused, ...]:
    return tuple(Refused(target, reasons) for target in chosen if (reasons := tuple(target.problems(job))))


def _check(site: Site) -> None:
    """Check that the names of a site can stand in the files of every target."""
    found: list[str] = []
    if not _TIME.fullmatch(site.time_limit):
        found.append(f"the time limit must be like 90, 24:00:00 or 2-12, as sbatch takes it, found {site.time_limit!r}")
    if not _LABEL.fullmatch(site.name):
        found.append(
            "the name of the job must be up to 40 lower-case letters, digits and hyphens, and begin with a letter, as "
            f"Kubernetes takes it, found {site.name!r}"
        )
    if not _VOLUME.fullmatch(site.volume):
        found.append(f"the volume must be NAME:/FOLDER, such as pipeloom:/shared, found {site.volume!r}")
    if site.image is not None and not _IMAGE.fullmatch(site.image):
        found.append(f"the image must be like registry.example.org/pipeloom:1, found {site.image!r}")
    if found:
        raise UserError("; ".join(found))


def _write(folder: Path, texts: dict[str, str], stale: set[str]) -> None:
    if not texts and not folder.exists():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Before anything is written or removed, so that a refusal changes nothing.
        foreign = [name for name in sorted({*texts, *stale}) if not _may_go(folder / name)]
        if foreign:
            raise UserError(
                f"{folder} has files that pipeloom did not write: {', '.join(foreign)}; choose another folder"
            )
        # All or none: good-looking scripts beside an empty one would start something else.
        with replaced(*(folder / name for name in texts)) as drafts:
            for draft, text in zip(drafts, texts.values(), strict=True):
                draft.write_text(text, encoding="utf-8")
        for name in stale:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder") from error


def _may_go(file: Path) -> bool:
    """Whether a file may be replaced: it does not exist, or an earlier call wrote it. A CSV has no mark."""
    return not file.exists() or file.suffix == ".csv" or MARK in file.read_text(encoding="utf-8", errors="replace")
