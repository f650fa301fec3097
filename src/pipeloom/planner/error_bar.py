"""How far off a plan's predictions may be, from what was held against measurements; nothing is made up."""

from dataclasses import asdict, dataclass
from typing import Any

from pipeloom.catalog import load_software, names
from pipeloom.catalog.accuracy import Accuracy, Errors, load_accuracy
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Software


@dataclass(frozen=True)
class ErrorBar:
    """What predictions for a program on a cluster rest on.

    Attributes:
        errors: of comparable predictions; ``None`` where nobody has measured the cluster's device.
        rests_on: one sentence, for people.
    """

    errors: Errors | None
    rests_on: str

    def to_json(self) -> dict[str, Any]:
        """``rests_on``, and the values of ``errors`` or ``None`` for each."""
        values = dict.fromkeys(Errors.__dataclass_fields__) if self.errors is None else asdict(self.errors)
        return {**values, "rests_on": self.rests_on}

    @property
    def text(self) -> str:
        """One line: the figures, if there are any, and what they rest on."""
        if self.errors is None:
            return self.rests_on
        errors = self.errors
        regret = ""
        if errors.median_regret is not None and errors.worst_regret is not None:
            regret = (
                "; compared with the fastest of its group, the layout ranked first took "
                f"{_longer(errors.median_regret)} in the median of {errors.groups} group{'s' * (errors.groups != 1)}, "
                f"{_longer(errors.worst_regret)} in the worst"
            )
        return (
            f"step times were {errors.mean_abs_error:.1%} off on average, 9 of 10 within {errors.p90_abs_error:.1%} "
            f"(bias {errors.bias:+.1%}){regret}: {self.rests_on}"
        )


def _longer(regret: float) -> str:
    return f"{regret:.1%} longer" if regret < 1 else f"{1 + regret:.0f} times as long"


def error_bar(cluster: Cluster, software: Software, accuracy: Accuracy | None = None) -> ErrorBar:
    """How far off predictions for ``software`` on ``cluster`` may be.

    A program of the catalog that was calibrated on the cluster's device has its error on held-out rows. Any other
    program has that of the general efficiencies on the device. A device without measurements has none; the sentence
    then names the worst that is known of the general efficiencies.

    Args:
        cluster: its device counts.
        software: with its efficiencies.
        accuracy: what is known; ``None`` for the catalog's.
    """
    known = accuracy or load_accuracy()
    device, source = cluster.device.name, f"{known.table}, {known.date}"
    held_out = known.by_program.get((software.name, device))
    if held_out is not None and _is_of_catalog(software):
        return ErrorBar(
            held_out,
            f"{held_out.rows} measured steps of {software.name} on {device} that the calibration that predicted them "
            f"had not seen ({source})",
        )
    general = known.by_device.get(device)
    if general is not None:
        means = known.general_of[device]
        # A mean alone would hide that one program may be predicted twice as well as another.
        best, worst = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        spread = ""
        if len(means) > 1:
            spread = f" ({means[best]:.1%} for {best} to {means[worst]:.1%} for {worst}), each weighing the same"
        return ErrorBar(
            general,
            f"{software.name} has not been calibrated on {device}, so this is the error of general efficiencies on "
            f"{general.rows:,} measured steps of {len(means)} other program{'s' * (len(means) != 1)} there{spread} "
            f"({source})",
        )
    return ErrorBar(None, _unmeasured(device, known))


def _is_of_catalog(software: Software) -> bool:
    """Whether its efficiencies are those whose calibration was tested, not somebody's own under the same name."""
    return software.name in names("software") and load_software(software.name).efficiency == software.efficiency


def _unmeasured(device: str, known: Accuracy) -> str:
    error, program, where = max(
        (error, program, where) for where, errors in known.general_of.items() for program, error in errors.items()
    )
    return (
        f"nobody has held predictions for {device} against a measured step, so how far off they are is unknown; "
        f"general efficiencies were {error:.1%} off on average in the worst case measured ({program} on {where}, "
        f"{known.table}, {known.date})"
    )
