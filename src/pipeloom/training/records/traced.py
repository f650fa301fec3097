"""Keeps the traces of the steps of which one is shown."""

from pipeloom.config import RunConfig
from pipeloom.execute.processes.world import World
from pipeloom.runs import run_folder
from pipeloom.runs.run_folder import RunFolder
from pipeloom.runs.traced_step import median_step, traced_candidates
from pipeloom.trace import Trace, merge, to_chrome
from pipeloom.training.records.earlier import Measured


class TracedSteps:
    """Traces of the candidates of a run, until one of them is chosen.

    Args:
        config: resolved.
        world: all ranks.
        folder: of the run.
        begun: steps before the run began.
    """

    def __init__(self, config: RunConfig, world: World, folder: RunFolder, begun: int) -> None:
        self._config, self._world, self._folder = config, world, folder
        self._candidates = traced_candidates(config, begun)
        self._times_s: dict[int, float] = {}
        self._traces: dict[int, tuple[Trace, int, float]] = {}
        self._is_chosen = False

    def is_candidate(self, step: int) -> bool:
        """Whether a step is a candidate; not again after going back."""
        return step in self._candidates and not self._is_chosen

    def keep(self, step: int, step_s: float, own: tuple[Trace, int, float], measured: Measured) -> None:
        """Keep a rank's trace; behind the last candidate gather those of the chosen step on rank 0, and write them.

        There is one for each pipeline. Plots are drawn after the ranks have exited.

        Args:
            step: a candidate.
            step_s: its seconds.
            own: trace of this rank, bytes that it held, seconds of exchanges within its compute.
            measured: gets what the chosen step measured.
        """
        self._times_s[step], self._traces[step] = step_s, own
        if step < self._candidates[-1]:
            return
        # Ranks measure different times, and all have to send the same step.
        chosen = self._world.from_first(median_step(self._candidates, self._times_s))
        measured.traced_step, own = chosen, self._traces[chosen]
        self._is_chosen = True
        self._traces.clear()
        every: list[tuple[Trace, int, float]] | None = self._world.gather(own)
        if every is None:
            return
        traces, live_bytes, exchanges_s = zip(*every, strict=True)
        layout = self._config.layout
        for number, ranks in enumerate(layout.pipelines()):
            trace = merge(traces[rank] for rank in ranks)
            # Summary and plot show the first pipeline.
            measured.trace = measured.trace or trace
            name = run_folder.other_trace(layout.coordinates(ranks[0])) if number else run_folder.TRACE
            self._folder.write(name, to_chrome(trace, "measured"), is_needed=False)
        by_rank = zip(*layout.pipelines(), strict=True)
        measured.live_bytes = tuple(max(live_bytes[rank] for rank in ranks) for ranks in by_rank)
        # On CUDA the host's clock would measure only the launch of a collective.
        if layout.tp > 1 and self._config.training.device == "cpu":
            measured.exchange_s = sum(exchanges_s) / len(exchanges_s)
