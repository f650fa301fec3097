"""Error bars of a plan: the errors of comparable predictions against measured steps."""

from dataclasses import asdict, dataclass
from typing import Any

from pipeloom.catalog import load_software, names
from pipeloom.catalog.accuracy import Accuracy, Errors, load_accuracy
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Software


@dataclass(frozen=True)
class ErrorBar:
    """Errors of comparable predictions.

    Attributes:
        errors: the statistics; ``None`` without measurements on the cluster's device.
        rests_on: one sentence about the measurements.
        tie: relative difference of two step times below which predictions do not decide which layout is faster: the
            mean absolute error, or without measurements the largest one of another device.
    """

    errors: Errors | None
    rests_on: str
    tie: float

    def to_json(self) -> dict[str, Any]:
        """``rests_on`` and the fields of ``errors``, each ``None`` without measurements."""
        values = dict.fromkeys(Errors.__dataclass_fields__) if self.errors is None else asdict(self.errors)
        return {**values, "rests_on": self.rests_on, "tie": self.tie}

    def is_tie(self, first_s: float, other_s: float) -> bool:
        """Whether two predicted step times, in seconds, differ by less than the predictions are off."""
        return abs(other_s / first_s - 1) < self.tie

    @property
    def text(self) -> str:
        """One line: the figures, if there are any, and the measurements."""
        if self.errors is None:
            return self.rests_on
        errors = self.errors
        sign = "short" if errors.bias < 0 else "long"
        regret = ""
        if errors.median_regret is not None:
            groups = f"{errors.groups} comparison{'s' * (errors.groups != 1)}"
            regret = (
                f"; in {groups} of layouts of one model and batch, the layout that was predicted fastest took "
                f"{errors.median_regret:.1%} longer than the fastest in the median (docs/accuracy.md has the worst)"
            )
        return (
            f"the average error of predicted step times is {errors.mean_abs_error:.1%}, 90% of them are within "
            f"{errors.p90_abs_error:.1%} (on average {abs(errors.bias):.1%} too {sign}){regret}: {self.rests_on}"
        )


def error_bar(cluster: Cluster, software: Software, accuracy: Accuracy | None = None) -> ErrorBar:
    """Measured errors of predictions for a program on a cluster's device.

    For a program of the catalog that was calibrated on the device, the errors on held-out rows; for any other program,
    the errors of the general efficiencies on the device. Without measurements on the device there are no errors, and
    the sentence names the largest error of the general efficiencies elsewhere.

    Args:
        cluster: whose device.
        software: with its efficiencies.
        accuracy: measured errors; ``None`` for the catalog's.
    """
    known = accuracy or load_accuracy()
    device, source = cluster.device.name, f"{known.table}, {known.date}"
    held_out = known.by_program.get((software.name, device))
    if held_out is not None and _is_of_catalog(software):
        return ErrorBar(
            held_out,
            f"{held_out.rows} measured steps of {software.name} on {device}, held out of the calibration ({source})",
            held_out.mean_abs_error,
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
            general.mean_abs_error,
        )
    return _unmeasured(device, known)


def _is_of_catalog(software: Software) -> bool:
    """Whether its efficiencies are those of the catalog, whose errors were measured."""
    return software.name in names("software") and load_software(software.name).efficiency == software.efficiency


def _unmeasured(device: str, known: Accuracy) -> ErrorBar:
    error, program, where = max(
        (error, program, where) for where, errors in known.general_of.items() for program, error in errors.items()
    )
    text = (
        f"no prediction for {device} was compared with a measured step, so the error is unknown; "
        f"general efficiencies were {error:.1%} off on average in the worst case measured ({program} on {where}, "
        f"{known.table}, {known.date})"
    )
    return ErrorBar(None, text, error)
