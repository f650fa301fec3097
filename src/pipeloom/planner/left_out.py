"""What the settings of a run leave out of the layouts that a plan searches, since train refuses them together."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeloom.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Parts of layouts that are not searched, each with the setting of the run that does not work with them.

    Attributes:
        strategies: (strategy, setting).
        sharing: settings that do not work with experts that ranks share.
        halves: settings that do not work with halves of a micro-batch in turns.
        one_group: settings that need several groups of ranks, each of which computes stages.
    """

    strategies: tuple[tuple[str, str], ...] = ()
    sharing: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()
    one_group: tuple[str, ...] = ()

    def problems(self, *, strategies: tuple[str, ...], shares: bool, halves: bool) -> Iterator[str]:
        """A sentence for each part that a question names all the same.

        Args:
            strategies: that it names.
            shares: whether it names several ranks that share experts.
            halves: whether it names halves of a micro-batch.
        """
        parts = [(f"strategy {name}", setting) for name, setting in self.strategies if name in strategies]
        parts += [("ep above 1", setting) for setting in self.sharing if shares]
        parts += [("ep_overlap", setting) for setting in self.halves if halves]
        for part, setting in parts:
            yield f"{setting} does not work with {part}; leave one of them out"


def left_out(config: RunConfig) -> LeftOut:
    """What a run's settings leave out."""
    training = config.training
    checking = () if training.check_every is None else ("training.check_every",)
    compiled = ("training.compile",) if training.compile else ()
    within = ("optimizer.update stage",) if config.optimizer.known_update.within_step else ()
    swapped = {
        f"training.on_spike {training.on_spike}": training.on_spike != "stop",
        "training.compile": training.compile,
        "optimizer.wide_weights false": not config.optimizer.wide_weights,
    }
    strategies = [("swap", name) for name, is_on in swapped.items() if is_on]
    strategies += [("swap", name) for name in within] + [("slices", name) for name in compiled]
    return LeftOut(strategies=tuple(strategies), sharing=(*within, *checking), halves=compiled, one_group=checking)
