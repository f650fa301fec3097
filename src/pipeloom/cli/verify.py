"""``pipeloom verify``: the pipeline's gradients beside those of a single process."""

from typing import TYPE_CHECKING

from pipeloom.cli.run_config import parse_run_config
from pipeloom.config import RunConfig, TrainingConfig

if TYPE_CHECKING:
    from pipeloom.training.equivalence import Equality

_SUMMARY = (
    "Prove that the configured pipeline computes the loss and the gradients of a single process, parameter by "
    "parameter. Runs in float64 by default, so that rounding explains no difference."
)


def run(words: list[str]) -> int:
    """Parse the configuration, run both, compare; 0 if they agree, 1 if not."""
    # In float64 rounding explains no difference of 1e-9; in float32 a lost micro-batch of many could hide in it.
    default = RunConfig(training=TrainingConfig(dtype="float64"))
    config = parse_run_config(words, "verify", _SUMMARY, default)
    from pipeloom.execute.processes.world import is_first
    from pipeloom.training.equivalence import verify_gradients

    equality = verify_gradients(config)
    return _report(equality) if is_first() else 0


def _report(equality: "Equality") -> int:
    differences, tolerance, worst = equality.differences, equality.tolerance, equality.worst
    width = max(map(len, differences))
    print(f"\n{'worst relative difference':<{width}}")
    for name, difference in differences.items():
        print(f"{name:<{width}}  {difference:.1e}{'' if difference <= tolerance else '  DIFFERS'}")
    if not equality.is_equal:
        number = f"{len(equality.wrong)} of {len(differences)}"
        print(f"\nDIFFERENT: {number} differ by more than {tolerance:g}; worst: {worst}")
        return 1
    print(
        f"\nEQUAL: loss, gradient norm and {len(differences) - 2} gradients agree within {tolerance:g}; "
        f"worst: {worst}, {differences[worst]:.1e}"
    )
    return 0
