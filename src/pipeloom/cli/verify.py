"""``pipeloom verify``: compares the pipeline's gradients with those of a single process."""

from typing import TYPE_CHECKING

from pipeloom.cli.reference import Command
from pipeloom.cli.run_config import VERIFICATION, parse_config
from pipeloom.config import RunConfig, TrainingConfig
from pipeloom.errors import UserError
from pipeloom.system.garbage import kept_imports

if TYPE_CHECKING:
    from pipeloom.training.equivalence import Equality

COMMAND = Command(
    name="verify",
    options=RunConfig,
    examples={
        "pipeloom verify": "the demo, in float64 to exclude rounding",
        "pipeloom verify run.toml --layout.shard full --layout.dp 2": "a run file with another layout",
    },
    settings=VERIFICATION,
    brief=("model", "layout", "schedule", "training.dtype", "training.device"),
    # In float32 a lost micro-batch of many could hide in a difference of 1e-9.
    default=RunConfig(training=TrainingConfig(dtype="float64")),
)


def run(words: list[str]) -> int:
    """Parse the configuration, run both, compare; 0 if they agree, 1 if not."""
    config = parse_config(COMMAND, words)
    with kept_imports():
        from pipeloom.execute.processes.world import is_first
        from pipeloom.training.equivalence import verify_gradients

    try:
        equality = verify_gradients(config)
    except UserError as error:
        # Bytes that stages keep are in a schedule file; processes find them, and pass on the text of their error.
        if "kept_bytes:" in str(error) and config.training.dtype == "float64":
            error.add_note("verify computes in float64 by default; give --training.dtype, as the file was written with")
        raise
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
