"""``pipeloom verify``: the pipeline's gradients beside those of a single process."""

from functools import partial
from typing import TYPE_CHECKING

from pipeloom.cli.reference import Command
from pipeloom.cli.run_config import VERIFICATION, other_axes, parse_config
from pipeloom.config import RunConfig, TrainingConfig
from pipeloom.errors import UserError
from pipeloom.terminal.words import count

if TYPE_CHECKING:
    from pipeloom.data.text import Data
    from pipeloom.execute.processes.world import World

COMMAND = Command(
    name="verify",
    options=RunConfig,
    examples={
        "pipeloom verify": "the demo in float64, where rounding explains no difference",
        "pipeloom verify run.toml --layout.shard full --layout.dp 2": "a run file with another layout",
    },
    settings=VERIFICATION,
    # In float32 a lost micro-batch of many could hide in a difference of 1e-9.
    default=RunConfig(training=TrainingConfig(dtype="float64")),
)
_NUM_BATCHES = 2
_REFERENCE_S = 3600.0
"""The other ranks wait while rank 0 computes the reference; longest time for that."""


def run(words: list[str]) -> int:
    """Parse the configuration, run both, compare; 0 if they agree, 1 if not."""
    config = parse_config(COMMAND, words)
    from pipeloom.data.text import load_data
    from pipeloom.execute.processes.world import is_first
    from pipeloom.training.memory_check import check_memory
    from pipeloom.training.session import check_processes, run_on_all_ranks

    # Swapped stages update and drop their gradients within the step.
    if config.schedule.device_budget is not None:
        raise UserError(
            "expected no schedule.device_budget: it lets gradients go before the end of the step, when they are "
            "compared; leave it out (the losses of `pipeloom train` are the same with and without it)"
        )
    check_processes(config)
    check_memory(config, verifies=True)
    if is_first():
        layout = config.layout
        print(
            f"{config.schedule.title} ({config.choice().placement_name}) over {count(layout.pp, 'pipeline rank')} x "
            f"{count(layout.loops, 'stage')}{other_axes(config)}; {count(layout.num_microbatches, 'micro-batch')}, "
            f"{config.training.known_dtype}, {_NUM_BATCHES} batches",
            flush=True,
        )
        # Once, before the processes, which find the tokens in the cache.
        load_data(config.data, config.training.seed)
    differences = run_on_all_ranks(config, partial(_compare, _NUM_BATCHES), _REFERENCE_S)
    return 0 if differences is None else _report(differences, config.training.known_dtype)


def _compare(num_batches: int, config: RunConfig, world: "World", data: "Data") -> dict[str, float] | None:
    """What each rank does."""
    from pipeloom.training.equivalence import compare_with_reference

    return compare_with_reference(config, world, data, num_batches)


def _report(differences: dict[str, float], dtype: str) -> int:
    from pipeloom.training.equivalence import TOLERANCES

    tolerance = TOLERANCES[dtype]
    width = max(map(len, differences))
    print(f"\n{'worst relative difference':<{width}}")
    for name, difference in differences.items():
        print(f"{name:<{width}}  {difference:.1e}{'' if difference <= tolerance else '  DIFFERS'}")
    worst = max(differences, key=lambda name: differences[name])
    # Not `>`, which is false for NaN.
    num_wrong = sum(not difference <= tolerance for difference in differences.values())
    if num_wrong:
        print(f"\nDIFFERENT: {num_wrong} of {len(differences)} differ by more than {tolerance:g}; worst: {worst}")
        return 1
    print(
        f"\nEQUAL: loss, gradient norm and {len(differences) - 2} gradients agree within {tolerance:g}; "
        f"worst: {worst}, {differences[worst]:.1e}"
    )
    return 0
