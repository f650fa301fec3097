"""Error bars of a plan: the errors of comparable predictions against measured steps."""

from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from pipeloom.catalog import load_software, names
from pipeloom.catalog.accuracy import Accuracy, Errors, load_accuracy
from pipeloom.catalog.program_files import GENERAL
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Software
from pipeloom.terminal.words import count
from pipeloom.workload.axes import RANKS_OF_AXES
from pipeloom.workload.run import Run

LEAST_PAIRS = 20
"""Fewer pairs of measured layouts do not decide how large the error of a comparison is."""
LONGER = 2.0
"""Sequences longer than the longest measured ones by more than this factor are unlike these."""


def features_of(run: Run) -> dict[str, str]:
    """What a run has whose prediction needs measurements of layouts that have it, too: name -> words."""
    found = {name: f"{words} ranks" for name, words in RANKS_OF_AXES.items() if run.sizes[name] > 1}
    if run.ep > 1:
        found["ep"] = "ranks that share experts"
    elif run.shape.experts is not None:
        found["experts"] = "experts"
    if run.products is not None:
        found[run.products] = f"products in {run.products}"
    return found


@dataclass(frozen=True)
class ErrorBar:
    """Errors of comparable predictions.

    Attributes:
        errors: the statistics; ``None`` without measurements on the cluster's device.
        rests_on: the measurements, in words.
        tie: relative difference of two predicted step times below which they do not decide which layout is faster:
            ``Errors.pair_error``, or without measurements the largest one of another device.
        efficiencies: a sentence with those of a program that was not calibrated on the device; ``None`` for others.
        wider_tie: ``tie`` for layouts unlike the measured ones.
        unlike: what no measured layout has and these have, in words.
    """

    errors: Errors | None
    rests_on: str
    tie: float
    efficiencies: str | None = None
    wider_tie: float = 0.0
    unlike: tuple[str, ...] = ()

    def of(self, *runs: Run) -> "ErrorBar":
        """The bar of layouts, some of which may have what no measured layout has."""
        if self.errors is None:
            return self
        features = {name: words for run in runs for name, words in features_of(run).items()}
        unlike = [words for name, words in sorted(features.items()) if name not in self.errors.features]
        longest = max((run.seq for run in runs), default=0)
        if longest > LONGER * self.errors.longest:
            unlike.append(f"{longest:,} tokens in a sequence (at most {self.errors.longest:,})")
        return replace(self, unlike=tuple(unlike), tie=max(self.tie, self.wider_tie)) if unlike else self

    def to_json(self) -> dict[str, Any]:
        """``rests_on``, ``tie``, ``unlike``, and the fields of ``errors``, each ``None`` without measurements."""
        values = dict.fromkeys(Errors.__dataclass_fields__) if self.errors is None else asdict(self.errors)
        return {**values, "rests_on": self.rests_on, "tie": self.tie, "unlike": list(self.unlike)}

    @property
    def cell(self) -> str:
        """The error of a step time for a table; ``?`` where it is unknown, or may be larger."""
        if self.errors is None:
            return "?"
        return f"{self.errors.mean_abs_error:.0%}{'?' if self.unlike else ''}"

    def is_tie(self, first_s: float, other_s: float) -> bool:
        """Whether the difference of two predicted step times, in seconds, is below ``tie``."""
        return abs(other_s / first_s - 1) < self.tie

    def on_speed(self, tokens_per_s: float, mfu: float) -> str | None:
        """A sentence with the speed of a layout at the errors of such step times; ``None`` without measurements.

        Args:
            tokens_per_s: as predicted.
            mfu: as predicted, a fraction.
        """
        if self.errors is None:
            return None
        # The bias is that of predicted / measured step times: a speed is divided by the step time.
        bias, error = self.errors.bias, self.errors.mean_abs_error
        usual, late = 1 + bias, 1 - error
        return (
            "Tokens/s, MFU and prices of the table have no correction for this. Row 1 has "
            f"{tokens_per_s * usual:,.0f} tokens/s and an MFU of {mfu * usual:.1%} if its step is as much too "
            f"{'short' if bias < 0 else 'long'} as these are on average, and {tokens_per_s * late:,.0f} tokens/s and "
            f"{mfu * late:.1%} if it is {error:.1%} too short."
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """The error of a step time, the error of a comparison, and the measurements."""
        errors = self.errors
        if errors is None:
            return (
                f"{self.rests_on}.",
                f"Layouts whose step times differ by less than {self.tie:.1%} are taken as a tie.",
                *filter(None, [self.efficiencies]),
            )
        sign = "short" if errors.bias < 0 else "long"
        step = (
            f"Step times: the average error is {errors.mean_abs_error:.1%}, 90% of them are within "
            f"{errors.p90_abs_error:.1%} (on average {abs(errors.bias):.1%} too {sign}): {self.rests_on}."
        )
        if self.unlike:
            step = f"No measured step has {' or '.join(self.unlike)}, so the error here may be larger. {step}"
        return (step, self._on_pairs(errors), *filter(None, [self.efficiencies]))

    def _on_pairs(self, errors: Errors) -> str:
        if self.unlike:
            return (
                f"Comparisons: none of such layouts were measured, so {self.tie:.1%}, the larger one of the error here "
                "and that of comparisons with general efficiencies, is taken as a tie."
            )
        if not _has_pairs(errors):
            measured = f"only {count(errors.pairs, 'pair')} of layouts" if errors.pairs else "none were"
            return f"Comparisons: {measured} measured, so {self.tie:.1%}, the error of a step time, is taken as a tie."
        shares = ((errors.order_below, "differed by less"), (errors.order_above, "differed by more"))
        orders = " and ".join(f"{share:.0%} of those that {which}" for share, which in shares if share is not None)
        return (
            f"Comparisons: of two layouts whose predicted step times differ by less than {self.tie:.1%}, either may be "
            f"faster. Of {errors.pairs:,} pairs of measured layouts of one model and batch, the predictions had the "
            f"order right for {orders}."
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
    held_out, general = known.by_program.get((software.name, device)), known.by_device.get(device)
    if held_out is not None and _is_of_catalog(software):
        return ErrorBar(
            held_out,
            f"{held_out.rows} measured steps of {software.name} on {device}, held out of the calibration ({source})",
            _tie(held_out),
            wider_tie=max(held_out.mean_abs_error, 0.0 if general is None else _tie(general)),
        )
    if general is not None:
        means = known.general_of[device]
        # A mean alone would hide that errors differ between programs.
        best, worst = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        spread = ""
        if len(means) > 1:
            spread = f" ({means[best]:.1%} for {best} to {means[worst]:.1%} for {worst}; all have equal weight)"
        return ErrorBar(
            general,
            f"{general.rows:,} measured steps of {count(len(means), 'program')} on {device}{spread}, predicted with "
            f"general efficiencies, since no step of {software.name} there was held out of a calibration ({source})",
            _tie(general),
            _efficiencies(software, cluster),
            wider_tie=max(general.mean_abs_error, _tie(general)),
        )
    return _unmeasured(device, known, source, _efficiencies(software, cluster))


def _has_pairs(errors: Errors) -> bool:
    return errors.pair_error is not None and errors.pairs >= LEAST_PAIRS


def _tie(errors: Errors) -> float:
    if errors.pair_error is not None and _has_pairs(errors):
        return errors.pair_error
    return max(errors.mean_abs_error, errors.pair_error or 0.0)


def _is_of_catalog(software: Software) -> bool:
    """Whether its efficiencies are those of the catalog, whose errors were measured."""
    return software.name in names("software") and load_software(software.name).efficiency == software.efficiency


def _efficiencies(software: Software, cluster: Cluster) -> str | None:
    """The efficiencies of a program without a calibration, beside the mean of programs that were measured on GPUs."""
    own, mean = software.efficiency, load_software(GENERAL).efficiency
    if own == mean or not cluster.device.is_gpu:
        return None
    return (
        f"Efficiencies of {software.name} are not measured on this device: {own.matmul:.0%} of the curve of "
        f"matrix products, {own.flash2:.0%} of the peak in attention, {own.data_bus:.0%} of the links in data-parallel "
        f"collectives. Measured programs reach {mean.matmul:.0%}, {mean.flash2:.0%} and {mean.data_bus:.0%} on average."
    )


def _unmeasured(device: str, known: Accuracy, source: str, efficiencies: str | None) -> ErrorBar:
    means = sorted(
        (error, program, where) for where, errors in known.general_of.items() for program, error in errors.items()
    )
    error, program, where = means[-1]
    text = (
        f"No prediction for {device} was compared with a measured step, so the error is unknown. General efficiencies "
        f"were {median(each for each, *_ in means):.1%} off in the median of programs and devices, and {error:.1%} in "
        f"the worst case measured ({program} on {where}: {source})"
    )
    # Single pairs elsewhere do not decide it.
    each = [_tie(errors) for errors in known.by_device.values() if _has_pairs(errors)]
    return ErrorBar(None, text, max(each or [error]), efficiencies)
