"""Prediction of a run's training step: schedule, trace, times, memory, and each rank's time by cause."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean

from pipeloom.analysis.bubble import BubbleAccount, account_bubble
from pipeloom.analysis.memory import MemoryCurve, memory_over_time
from pipeloom.analysis.summary import longest_rank_s
from pipeloom.cost.costs import ActionCosts, StageCosts
from pipeloom.cost.exchanges import StepTerms, drain_s, stage_collectives_s, step_terms, update_s
from pipeloom.cost.flops import hardware_flops, shape_model_flops
from pipeloom.cost.memory import Memory
from pipeloom.cost.pieces import InnerSeconds, PieceSeconds
from pipeloom.cost.placed import OfPlaced, Placed
from pipeloom.cost.slices import SliceModel
from pipeloom.cost.software import Software
from pipeloom.cost.stages import layers_by_kind, num_frozen_stages, pieces_of_layers
from pipeloom.errors import UserError
from pipeloom.families import FAMILIES, Choice
from pipeloom.predict.inside import blocked_s, gathered_s
from pipeloom.predict.memory import held_bytes, memory_by_rank
from pipeloom.predict.moves import by_seconds, with_moves
from pipeloom.predict.places import Place, rank_places, shared_links
from pipeloom.predict.sizes import ClosedSizes, placing_sizes
from pipeloom.predict.stage_swaps import swapped_costs, swapped_held, swapped_memory, with_updates
from pipeloom.recipe import (
    Knobs,
    Recipe,
    build,
    communicating,
    nominal,
    run_recipe,
    schedule_text,
    shared_state,
    without_messages,
)
from pipeloom.schedule import Kind, Level, Schedule
from pipeloom.schedule.facts import Graph
from pipeloom.simulation import simulate
from pipeloom.terminal.notebook import Pictured
from pipeloom.terminal.words import count, format_bytes, seconds
from pipeloom.trace import Trace
from pipeloom.workload.layout import Recompute, Shard, even_slices
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class Prediction:
    """Predicted times and memory of a step.

    Attributes:
        step_time_s: seconds of the step.
        pipeline_s: seconds from the first forward to the last backward; if steps overlap, on the slowest rank.
        terms: seconds after the pipeline.
        costs: seconds of the actions of each stage.
        memory_by_rank: memory that one device of each pipeline rank needs.
        device_bytes: memory that one device of each pipeline rank has.
    """

    step_time_s: float
    pipeline_s: float
    terms: StepTerms
    costs: StageCosts
    memory_by_rank: tuple[Memory, ...]
    device_bytes: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether the memory of every rank fits its devices."""
        return self.filled <= 1

    @property
    def filled(self) -> float:
        """Share of the memory of the fullest device."""
        return self.memory.total_bytes / self.device_bytes[self.fullest_rank]

    @property
    def memory(self) -> Memory:
        """Memory of the fullest device."""
        return self.memory_by_rank[self.fullest_rank]

    @property
    def fullest_rank(self) -> int:
        """The pipeline rank whose devices have the least free memory."""
        # Free memory, not used memory, since devices may differ.
        over = [memory.total_bytes - room for memory, room in zip(self.memory_by_rank, self.device_bytes, strict=True)]
        return over.index(max(over))


@dataclass(frozen=True)
class StepAccount:
    """One rank's step time by cause; the parts add up to it.

    Attributes:
        pipeline: the bubble account of the pipeline. Exchanges of a blocking program count as exposed p2p, what gathers
            of layers add to compute as exposed data-parallel; an observed additional drain
            (``Software.extra_drain_slots``) counts as drain.
        data_parallel_s: collectives after the pipeline.
        optimizer_s: update of the weights.
        host_s: constant overhead after the pipeline.
    """

    pipeline: BubbleAccount
    data_parallel_s: float
    optimizer_s: float
    host_s: float

    def to_dict(self) -> dict[str, float]:
        """Part -> seconds; collectives and host time after the pipeline are added to those in it."""
        account = self.pipeline
        return {
            "compute_s": account.compute_s,
            "startup_s": account.startup_s,
            "imbalance_s": account.imbalance_s,
            "exposed_p2p_s": account.exposed_p2p_s,
            "exposed_swaps_s": account.exposed_swaps_s,
            "exposed_data_parallel_s": account.exposed_data_parallel_s + self.data_parallel_s,
            "host_s": account.host_s + self.host_s,
            "drain_s": account.drain_s,
            "optimizer_s": self.optimizer_s,
        }


@dataclass(frozen=True, repr=False)
class SimulatedStep(Pictured, OfPlaced):
    """A predicted step, with the schedule, costs and trace that it follows from. A notebook shows its timeline.

    Attributes:
        placed: the run, its cluster and its program.
        knobs: choices for its schedule.
        schedule: the simulated schedule.
        trace: of the pipeline.
        prediction: times and memory.
        drain_s: additional seconds of filling and draining the pipeline (``pipeloom.cost.exchanges.drain_s``).
    """

    knobs: Knobs
    schedule: Schedule
    trace: Trace
    prediction: Prediction
    drain_s: float

    def __repr__(self) -> str:
        """Layout, time, utilization, and the memory of the fullest device."""
        run, prediction = self.run, self.prediction
        shard = f", shard {run.shard}" if run.data_ranks > 1 else ""
        layout = f"{run.axes.product()}{shard}, loops {run.loops}"
        batch = f"{count(run.num_microbatches, 'micro-batch')} of {run.micro_batch}"
        held = f"{format_bytes(prediction.memory.total_bytes)} on the fullest device"
        return (
            f"SimulatedStep({self.knobs.choice.family}, {layout}, {batch}: {seconds(prediction.step_time_s)}, "
            f"MFU {self.mfu:.1%}, {held}{'' if prediction.fits else ', which does not fit'})"
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together."""
        return self.run.global_batch * self.run.share_of_updates * self.run.seq / self.prediction.step_time_s

    @property
    def peak_flops_per_s(self) -> float:
        """Peak FLOP/s of all devices together."""
        return self.cluster.peak_flops_per_s(self.run.num_devices, self.run.peak_precision)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The nodes of each pipeline rank."""
        return rank_places(self.placed)

    @cached_property
    def fastest_partition(self) -> tuple[int, ...] | None:
        """The fastest ``layout.partition``; ``None`` if ranks are equally fast, or if it is the run's partition."""
        if len(set(self.placed.slowness)) == 1:
            return None
        layers = self.placed.with_fastest_layers().layers
        return None if layers == self.placed.layers else pieces_of_layers(layers)

    @property
    def has_measured_pieces(self) -> bool:
        """Whether the seconds of all pieces were measured on the cluster; otherwise some are closed forms."""
        alike = [self.run.alike(kind) for kind in set(self.run.layer_kinds)]
        return all(pieces.is_measured for run in alike for pieces in self.placed.of(run).pieces)

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        """Dollars per billion tokens; ``None`` if the cluster has no price."""
        price = self.cluster.price_per_hour(self.run.num_devices)
        return None if price is None else price * 1e9 / self.tokens_per_s / 3600

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, a fraction (``pipeloom.cost.flops.mfu``)."""
        return self.tokens_per_s * self._model_flops / self.peak_flops_per_s

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization, a fraction: MFU with recomputed FLOPs."""
        run = self.run
        flops = {
            kind: hardware_flops(run.shape, run.seq, kind, run.frozen_pieces, run.adapter)
            for kind in ("none", "selective", "full")
        }
        again = self.recomputed_share * (flops["full"] - flops["none"])
        mean = fmean(flops[kind] for kind in run.recompute_kinds)
        return self.tokens_per_s * (mean + again) / self.peak_flops_per_s

    @property
    def _model_flops(self) -> float:
        return shape_model_flops(self.run.shape, self.run.seq, self.run.frozen_pieces, self.run.adapter)

    @property
    def recomputed_share(self) -> float:
        """Share of the forwards that are repeated by actions ``R``, a fraction."""
        row = self.schedule.facts.row
        return float(row.is_kind(Kind.RECOMPUTE).sum() / row.is_kind(Kind.FORWARD).sum())

    @cached_property
    def accounts(self) -> tuple[StepAccount, ...]:
        """The step time of each pipeline rank by cause."""
        terms, hidden_s = self.prediction.terms, self.trace.end_s + self.drain_s - self.prediction.pipeline_s
        accounts = account_bubble(self.schedule, self.trace)
        return tuple(
            StepAccount(
                replace(
                    account,
                    compute_s=account.compute_s - blocked_s - gathered.exposed_s,
                    startup_s=account.startup_s - max(0.0, hidden_s - account.drain_s),
                    exposed_p2p_s=account.exposed_p2p_s + blocked_s,
                    exposed_data_parallel_s=account.exposed_data_parallel_s + gathered.exposed_s,
                    drain_s=max(0.0, account.drain_s - hidden_s) + self.drain_s,
                ),
                terms.reduce_s + terms.tied_s + terms.shared_s + terms.average_s,
                terms.optimizer_s,
                terms.fixed_s,
            )
            for account, blocked_s, gathered in zip(accounts, self.blocked_s, self.gathered_s, strict=True)
        )

    @cached_property
    def blocked_s(self) -> tuple[float, ...]:
        """For each rank the seconds of exchanges in its compute actions; 0 unless the program is blocking."""
        return tuple(self.schedule.num_microbatches * each_s for each_s in blocked_s(self.placed))

    @cached_property
    def gathered_s(self) -> tuple[InnerSeconds, ...]:
        """For each rank the gathers and reductions of layers beside the compute of others, inside compute actions."""
        number = self.schedule.num_microbatches
        return tuple(InnerSeconds(number * busy_s, number * exposed_s) for busy_s, exposed_s in gathered_s(self.placed))

    @cached_property
    def ring_s(self) -> InnerSeconds:
        """The exchange of keys and values over the context axis, in the mean of the pipeline ranks."""
        busy_s = exposed_s = 0.0
        for pieces, number, recompute in self._layer_kinds() if self.run.cp > 1 else ():
            forwards = 1 + (recompute != "none") + self.recomputed_share  # a recomputed forward exchanges again
            busy_s += number * (forwards * pieces.ring_busy_s[0] + pieces.ring_busy_s[1])
            exposed_s += number * (forwards * pieces.ring_exposed_s[0] + pieces.ring_exposed_s[1])
        each = self.run.num_microbatches / self.schedule.num_ranks
        return InnerSeconds(busy_s * each, exposed_s * each)

    @cached_property
    def travel_s(self) -> InnerSeconds:
        """The exchanges of tokens between ranks that share experts, in the mean of the pipeline ranks."""
        busy_s = exposed_s = 0.0
        for pieces, number, recompute in self._layer_kinds() if self.run.ep > 1 else ():
            forwards, (forth_s, back_s) = 1 + self.recomputed_share, pieces.hidden_travel_s
            own_s = (forwards + (recompute == "full")) * pieces.travel_s[0] + pieces.travel_s[1]
            busy_s, exposed_s = busy_s + number * own_s, exposed_s + number * (own_s - forwards * forth_s - back_s)
        if self.run.ep_overlap:  # each stage exposes its last exchange
            placed = self.placed
            exposed_s += sum(sum(placed.pieces[rank].stage) for rank in placed.placement.rank_by_stage)
        each = self.run.num_microbatches / self.schedule.num_ranks
        return InnerSeconds(busy_s * each, exposed_s * each)

    def _layer_kinds(self) -> Iterator[tuple[PieceSeconds, int, Recompute]]:
        """For each kind of layers of each stage their seconds, number, and what they recompute."""
        placed, owner = self.placed, self.placed.placement.rank_by_stage
        for stages, rank in zip(layers_by_kind(self.run, self.software), owner, strict=True):
            for alike, number in stages:
                yield placed.of(alike).pieces[rank], number, alike.recompute

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipeline's time in which ranks do not compute."""
        idle = sum(account.pipeline.idle_s for account in self.accounts)
        whole = len(self.accounts) * self.prediction.pipeline_s
        return idle / whole if whole else 0.0

    @property
    def schedule_text(self) -> str:
        """Text of a schedule file for ``pipeloom train``."""
        recipe = recipe_of(self.run, self.software, self.knobs)
        return schedule_text(recipe, self.schedule, placing_sizes(self.placed, self.knobs))

    @property
    def sizes(self) -> ClosedSizes:
        """Bytes of its stages on its devices."""
        return ClosedSizes.of(self.run, self.software, is_gpu=self.cluster.device.is_gpu)

    @cached_property
    def memory_over_time(self) -> tuple[MemoryCurve, ...]:
        """For each pipeline rank the bytes that a device of it holds during the pipeline."""
        held = held_bytes(self.sizes.run, self.software, self.schedule)
        if self.knobs.device_budget is not None:
            held = swapped_held(held, self.run, self.software, self.schedule.placement)
        return memory_over_time(self.schedule, self.trace, held)


def simulate_step(placed: Placed, knobs: Knobs, *, moves_by_seconds: bool = True) -> SimulatedStep:
    """Predict the step of a run: make its schedule with all communication, and simulate it with its costs.

    The result's run has the placement of the family and, if ranks are not equally fast and the program balances them,
    the layers of each stage.

    Args:
        placed: the run, its cluster and its program.
        knobs: choices for its schedule.
        moves_by_seconds: whether moves are placed by the predicted seconds, which ``pipeloom train`` executes only from
            a schedule file; otherwise by nominal ones, as ``train`` does itself.

    Raises:
        UserError: the schedule cannot be made, the cluster has too few devices, or devices would exceed their peak, so
            that the file of the cluster or of the program must be wrong.
    """
    placed = placed_in(placed, knobs.choice)
    run, cluster, software = placed.run, placed.cluster, placed.software
    costs = with_collectives(placed)
    terms = step_terms(placed, max(costs.backward_s))
    price = partial(SliceModel(placed).costs, lengths=run.slices) if run.slices else _whole
    how = recipe_of(run, software, knobs)
    sizes = ClosedSizes.of(run, software, is_gpu=cluster.device.is_gpu)
    timing = by_seconds(costs, placed, how.moves, price) if moves_by_seconds else nominal
    schedule = build(how, placing_sizes(placed, knobs), timing)
    if how.moves.is_any:
        costs = with_moves(costs, placed, how.moves, schedule.partners, sizes.kept(schedule))
    if knobs.device_budget is not None:
        costs = swapped_costs(costs, placed)
    if how.updates is not None:
        part = placed if run.swapped is run else placed.of(run.swapped)
        within_s = update_s(part.of_state)
        costs = with_updates(costs, part, within_s)
        if not run.updates_stages:  # those of what is swapped are actions of the schedule
            terms = replace(terms, optimizer_s=terms.optimizer_s - within_s)
    # Without messages no links are shared, but cores may be.
    has_shared = schedule.level is Level.COMMUNICATION or cluster.crowding(run.num_devices) > 1
    links = shared_links(placed, schedule.placement, schedule.partners) if has_shared else None
    trace = simulate(schedule, price(costs), links)
    more_s = drain_s(run, software, costs)
    memory = memory_by_rank(sizes.run, software, schedule, knobs.receive_buffers, trace)
    if knobs.device_budget is not None:
        memory = swapped_memory(memory, run, software, schedule)
    pipeline_s = (longest_rank_s(trace) if software.overlaps_steps else trace.end_s) + more_s
    if run.delays_average:  # it runs beside the updates
        terms = replace(terms, average_s=max(0.0, terms.average_s - pipeline_s - terms.optimizer_s))
    prediction = Prediction(pipeline_s + terms.total_s, pipeline_s, terms, costs, memory, placed.device_bytes)
    step = SimulatedStep(placed, knobs, schedule, trace, prediction, more_s)
    # Faster than the hardware's peak: a number in a file must be wrong.
    if step.hfu > 1:
        raise UserError(_impossible(step))
    return step


def placed_in(placed: Placed, choice: Choice) -> Placed:
    """The run with the placement, slices, partition and kind of exchanges that the program uses for a family."""
    run, software = placed.run, placed.software
    if choice.family in FAMILIES and FAMILIES[choice.family].splits_backward and not software.blocks_split:
        software = replace(software, is_blocking=False)
    if run.placement != choice.placement_name:
        run = replace(run, placement=choice.placement_name)
    if choice.num_slices > 1 and not run.slices:
        run = replace(run, slices=even_slices(run.seq, choice.num_slices, run.tp))
    if (run, software) == (placed.run, placed.software):
        return placed.balanced
    return Placed(run, placed.cluster, software).balanced


def _impossible(step: SimulatedStep) -> str:
    """The message about a step whose devices would exceed their peak."""
    devices = " and ".join(dict.fromkeys(kind.device.name for kind, _ in step.cluster.kinds(step.run.num_devices)))
    return (
        f"the prediction is impossible: {devices} would use {step.hfu:.1%} of the peak (HFU; MFU {step.mfu:.1%}), "
        "expected at most 100 %; correct peak_tflop_per_s, matmul_fraction or the measured pieces of the cluster "
        f"{step.cluster.name}, or the efficiencies of the program {step.software.name}"
    )


def _whole(costs: StageCosts) -> ActionCosts:
    """Costs of whole sequences."""
    return costs


def with_collectives(placed: Placed) -> StageCosts:
    """Seconds of a run's actions; with those of gathers and reductions, if the program has a lane for them."""
    if not placed.software.has_reduction_lane or _shared_state(placed.run) is None:
        return placed.costs
    unshard_s, reduce_s = stage_collectives_s(placed)
    return replace(placed.costs, unshard_s=unshard_s, reduce_s=reduce_s)


def _shared_state(run: Run) -> Shard | None:
    return shared_state(run.shard, data_ranks=run.reducing_ranks, sequence_parallel=run.sequence_parallel)


def recipe_of(run: Run, software: Software, knobs: Knobs) -> Recipe:
    """The recipe of a run's schedule with a program.

    Args:
        run: model and layout.
        software: the training program; the schedule has no messages if it blocks, and no collectives if they follow the
            pipeline.
        knobs: choices for the schedule.
    """
    if run.frozen_pieces:
        knobs = replace(knobs, choice=replace(knobs.choice, frozen_stages=num_frozen_stages(run, software)))
    return run_recipe(
        knobs,
        shard=_shared_state(run) if software.has_lanes else None,
        lends_tied=run.shape.tied and software.lends_tied and not software.is_blocking,
        trains_tied=run.adapter is None,
        sends=not software.is_blocking,
        swaps_part=run.swapped is not run,
        updates_stages=run.updates_stages,
    )


def lowered(run: Run, software: Software, knobs: Knobs) -> Schedule:
    """The schedule with the program's communication and updates of stages, without moves and swaps.

    Raises:
        UserError: the schedule cannot be made.
    """
    return communicating(recipe_of(run, software, knobs))


def graph_without_messages(run: Run, software: Software, knobs: Knobs, rank: int | None = None) -> Graph:
    """The dependency graph of ``lowered`` without messages: a lower bound of the step time, much faster to make.

    Args:
        run: model and layout.
        software: the training program.
        knobs: choices for the schedule.
        rank: the only one with actions; ``None``: all have theirs.

    Raises:
        UserError: the schedule cannot be made.
    """
    return without_messages(recipe_of(run, software, knobs), rank)


def compute_schedule(choice: Choice) -> Schedule:
    """The family's schedule before any pass.

    Raises:
        UserError: the schedule cannot be made.
    """
    return communicating(Recipe(start=choice, receive_buffers=None))


def memory_that_would_fit(step: SimulatedStep) -> dict[str, float]:
    """Settings that each lower the peak memory of the fullest rank, with the same order of compute -> its new bytes.

    If a rank with other devices becomes the fullest, the bytes for which the former one would have as little free
    memory.
    """
    run, now = step.run, step.prediction.memory.total_bytes
    changes: dict[str, Run] = {}
    levels = ("optimizer", "gradients", "full")
    if run.data_ranks > 1:
        open_levels = levels[levels.index(run.shard) + 1 :] if run.shard in levels else levels
        changes |= {f"layout.shard {level}": replace(run, shard=level) for level in open_levels}
    if run.tp > 1 and not run.sequence_parallel:
        changes["layout.sequence_parallel true"] = replace(run, sequence_parallel=True)
    if set(run.recompute_kinds) == {"none"}:
        # recompute_layers would override recompute.
        changes["layout.recompute selective"] = replace(run, recompute="selective", recompute_layers=None)
    if set(run.recompute_kinds) != {"full"}:
        changes["layout.recompute full"] = replace(run, recompute="full", recompute_layers=None)
    totals = {name: _fullest_bytes(changed, step) for name, changed in changes.items()}
    return {name: total for name, total in totals.items() if total < now}


def _fullest_bytes(run: Run, step: SimulatedStep) -> float:
    # Moves were placed with the gathers of this schedule.
    is_same = run.shard == step.run.shard or step.knobs.moves.is_any
    schedule = step.schedule if is_same else lowered(run, step.software, step.knobs)
    now, device_bytes = step.prediction.fullest_rank, step.prediction.device_bytes
    run = ClosedSizes.of(run, step.software, is_gpu=step.cluster.device.is_gpu).run
    trace = step.trace if is_same else None
    held = memory_by_rank(run, step.software, schedule, step.knobs.receive_buffers, trace)
    return max(memory.total_bytes + (device_bytes[now] - room) for memory, room in zip(held, device_bytes, strict=True))
