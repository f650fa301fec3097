"""A run on a cluster with a training program: nodes of its ranks, and seconds of its stages.

In global ranks the pipeline axis is outermost (``pipeloom.workload.axes``), so that a pipeline rank has adjacent
devices. They work in lockstep, since tensor-parallel ranks meet at each
collective and replicas at the end of a step: the slowest device determines their seconds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from pipeloom.cost.coding import coding_s_of
from pipeloom.cost.collectives import layer_collectives_s, together_s
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.partition import fastest_partition
from pipeloom.cost.pieces import PieceSeconds, piece_seconds
from pipeloom.cost.software import Software
from pipeloom.cost.stages import (
    StageKinds,
    frozen_layers,
    layers_by_kind,
    layers_of_pieces,
    num_frozen_stages,
    parameters_by_rank,
    placement_of,
    stage_layers,
    stage_parameters,
    tied_ranks,
    trained_parameters,
    with_shared,
)
from pipeloom.schedule import Placement
from pipeloom.workload.layout import place_of
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class Placed:
    """A run with everything that its prediction depends on except its schedule.

    Members that depend on the nodes of ranks raise a ``UserError`` if the cluster has too few devices.

    Attributes:
        run: model and layout.
        cluster: where it runs.
        software: the training program.
    """

    run: Run
    cluster: Cluster
    software: Software

    def of(self, run: Run) -> "Placed":
        """Another run on the same cluster with the same program."""
        return self if run is self.run else Placed(run, self.cluster, self.software)

    @cached_property
    def of_state(self) -> "Placed":
        """The run with only what affects its state (``Run.of_state``), equal for many runs of a search."""
        return self.of(self.run.of_state)

    @cached_property
    def placement(self) -> Placement:
        """Stage -> pipeline rank."""
        return placement_of(self.run)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return stage_layers(self.run, self.software)[0]

    @cached_property
    def parameters(self) -> tuple[float, ...]:
        """Number of parameters of each stage on one device."""
        return stage_parameters(self.run, self.software)

    @cached_property
    def rank_parameters(self) -> tuple[float, ...]:
        """Number of parameters on one device of each pipeline rank."""
        return with_shared(self.run, self.software, parameters_by_rank(self.run, self.parameters))

    @cached_property
    def trained_parameters(self) -> tuple[float, ...]:
        """``parameters`` of the pieces, or adapters, that are trained."""
        return trained_parameters(self.run, self.software) if self.run.frozen_pieces else self.parameters

    @cached_property
    def trained_rank_parameters(self) -> tuple[float, ...]:
        """``rank_parameters`` of the pieces that are trained."""
        if not self.run.frozen_pieces:
            return self.rank_parameters
        return parameters_by_rank(self.run, self.trained_parameters)

    def with_sharding_of(self, run: Run) -> "Placed":
        """A run that differs in its sharding alone: what sharding does not change is computed once for all of them."""
        other = self.of(run)
        # Every sharding needs these; computed here they are shared, too.
        _ = self.placement, self.rank_parameters, self.trained_rank_parameters
        # Layers that are gathered one by one are part of the seconds of a stage.
        own, changes = self.__dict__, "costs" if self.software.gathers_layers else None
        other.__dict__.update({name: own[name] for name in _SHARED_BY_SHARDINGS if name in own and name != changes})
        return other

    def first_device(self, rank: int) -> int:
        """Index of the first of a pipeline rank's adjacent devices."""
        return place_of(rank, self.run.pipeline_order) * self.run.stage_devices

    @property
    def first_devices(self) -> list[int]:
        """``first_device`` of each pipeline rank."""
        return [self.first_device(rank) for rank in range(self.run.pp)]

    def are_near(self, one: int, other: int) -> bool:
        """Whether each device of a pipeline rank is on the same node as its peer of the other rank."""
        begin, end, node_of = self.first_device(one), self.first_device(other), self.cluster.node_of
        return all(node_of(begin + n)[0] == node_of(end + n)[0] for n in range(self.run.stage_devices))

    @property
    def parts(self) -> tuple[Cluster, ...]:
        """For each pipeline rank a cluster with nodes of one kind that represents its devices."""
        return _parts(self.cluster, self.run.stage_devices, self.run.pp, self.run.pipeline_order)

    @property
    def _kinds(self) -> tuple[Cluster, ...]:
        """Distinct ``parts``."""
        return _kinds(self.cluster, self.run.stage_devices, self.run.pp, self.run.pipeline_order)

    @property
    def has_equal_ranks(self) -> bool:
        """Whether the devices of all pipeline ranks are of one kind."""
        return len(self._kinds) == 1

    def route(self, one: int, other: int) -> Cluster:
        """A cluster with nodes of one kind that represents messages between two pipeline ranks."""
        size = self.run.stage_devices
        return self.cluster.route(self.first_device(one), self.first_device(other), size)

    @cached_property
    def device_bytes(self) -> tuple[float, ...]:
        """Memory of one device of each pipeline rank, in bytes."""
        # Most clusters have one kind of nodes, and need no lookup for each rank.
        if self.has_equal_ranks:
            return (self._kinds[0].device.memory_bytes,) * self.run.pp
        return tuple(part.device.memory_bytes for part in self.parts)

    @cached_property
    def pieces(self) -> tuple[PieceSeconds, ...]:
        """For each pipeline rank the seconds of the model's pieces, if all layers recompute ``run.recompute``."""
        of_part = {part: piece_seconds(self.run, part, self.software) for part in self._kinds}
        if self.has_equal_ranks:
            return tuple(of_part.values()) * self.run.pp
        return tuple(of_part[part] for part in self.parts)

    @cached_property
    def fastest_pieces(self) -> PieceSeconds:
        """Seconds of the model's pieces, each on the fastest rank for it."""
        pieces = [piece_seconds(self.run, part, self.software) for part in self._kinds]
        if len(pieces) == 1:
            return pieces[0]
        return replace(
            min(pieces, key=lambda each: sum(each.layer)),
            embedding=min((each.embedding for each in pieces), key=sum),
            head=min((each.head for each in pieces), key=sum),
        )

    @property
    def slowness(self) -> tuple[float, ...]:
        """For each pipeline rank the seconds of a layer, forward and backward, / those on the fastest rank."""
        layer_s = [sum(pieces.layer) for pieces in self.pieces]
        fastest_s = min(layer_s)
        return tuple(seconds / fastest_s for seconds in layer_s)

    @cached_property
    def recompute_s(self) -> tuple[float, ...]:
        """For each pipeline rank the additional seconds of a layer's backward with full recomputation.

        Where layers differ, of the one that takes least. They may differ from a forward's, since launches of the host
        overlap with compute of the device.
        """
        found: list[tuple[float, ...]] = []
        for run in self.run.with_lightest_layers:
            kinds = (run.changed(recompute_layers=None, recompute=kind) for kind in ("none", "full"))
            plain, again = (self.of(kind).pieces for kind in kinds)
            both = zip(plain, again, strict=True)
            found.append(tuple(max(0.0, full.layer[1] - none.layer[1]) for none, full in both))
        return found[0] if len(found) == 1 else tuple(map(min, *found))

    @cached_property
    def lightest_pieces(self) -> PieceSeconds:
        """``fastest_pieces``, where layers differ of the one that takes least."""
        every = [self.of(run).fastest_pieces for run in self.run.with_lightest_layers]
        return min(every, key=lambda each: sum(each.layer))

    @property
    def piece_seconds(self) -> list[float]:
        """Seconds of each piece on the fastest rank, forward and backward of a micro-batch: embedding, layers, head."""
        kinds = self.run.layer_kinds
        pieces = {kind: self.of(self.run.alike(kind)).fastest_pieces for kind in set(kinds)}
        ends = pieces[kinds[0]]
        both_s = [ends.embedding, *(pieces[kind].layer for kind in kinds), ends.head]
        frozen = self.run.frozen_pieces
        if self.run.adapter is not None:  # layers that train nothing have no adapters
            bare = [self.of(replace(self.run.alike(kind), adapter=None)).fastest_pieces for kind in kinds[: frozen - 1]]
            both_s[1:frozen] = [pieces.layer for pieces in bare]
        return [*(forward_s for forward_s, _ in both_s[:frozen]), *map(sum, both_s[frozen:])]

    def with_fastest_layers(self, slowness: Sequence[float] | None = None) -> "Placed":
        """The run with the partition that minimizes the seconds of its slowest rank.

        Uses the run's placement and ignores ``run.layers_by_stage``.

        Args:
            slowness: for each pipeline rank a factor of the fastest rank's seconds; ``None`` for ``self.slowness``.

        Raises:
            UserError: more stages than pieces.
        """
        sizes = fastest_partition(self.piece_seconds, self.placement, slowness or self.slowness)
        return self.of(replace(self.run, layers_by_stage=layers_of_pieces(sizes)))

    @property
    def balanced(self) -> "Placed":
        """The run with fastest layers, if its program balances layers and its ranks are not equally fast.

        Raises:
            UserError: more stages than pieces.
        """
        if self.run.layers_by_stage is not None or self.software.partition != "balanced":
            return self
        slowness = self.slowness
        return self if min(slowness) == max(slowness) else self.with_fastest_layers(slowness)

    @cached_property
    def costs(self) -> StageCosts:
        """Seconds of each stage's forward and backward for one micro-batch, and of messages between stages.

        A stage runs on its rank's part of the cluster. The weight half of a split backward has the second of the two
        products of each weight matrix, the accumulation over micro-batches, and all of the embedding's backward.
        """
        run, software, owner = self.run, self.software, self.placement.rank_by_stage
        counts, head = stage_layers(run, software)
        counts = [count - frozen for count, frozen in zip(counts, frozen_layers(run, software), strict=True)]
        first_trained, of_rank = num_frozen_stages(run, software), self.pieces
        has_backward = [stage >= first_trained for stage in range(run.num_stages)]
        pieces = [of_rank[rank] for rank in owner]
        layers_s, boundary_s = _layers_s(self), _boundary_s(self)
        around_s = (0.0, *boundary_s, 0.0)
        sides = []
        for direction in (0, 1):
            own_s = software.efficiency.microbatch_s / run.loops * _FIXED_SHARES[direction]
            seconds = [
                both_s[direction] + (own_s + piece.stage[direction]) * (runs or direction == 0)
                for both_s, piece, runs in zip(layers_s, pieces, has_backward, strict=True)
            ]
            if direction == 0 or not run.frozen_pieces:
                seconds[0] += pieces[0].embedding[direction]
            seconds[head] += pieces[head].head[direction]
            if software.is_blocking:
                seconds = [value + sum(both_s) / 2 for value, both_s in zip(seconds, pairwise(around_s), strict=True)]
            sides.append(tuple(_with_coding(self, seconds, direction)))
        weight_s = [count * piece.weight_s for count, piece in zip(counts, pieces, strict=True)]
        whole_s = sum(backward_s for _, backward_s in layers_s)  # 0 if all layers are frozen
        share = sum(weight_s) / whole_s if whole_s else 0.0
        weight_s[0] += 0.0 if run.frozen_pieces else pieces[0].embedding[1]
        weight_s[head] += pieces[head].head_weight_s
        free_s = () if software.is_blocking else boundary_s
        tied_s, tied_grad_s = _tied_message_s(self)
        return StageCosts(
            sides[0],
            sides[1],
            min(free_s, default=0.0),
            weight_share=share,
            tied_s=tied_s,
            tied_grad_s=tied_grad_s,
            boundary_s=() if len(set(free_s)) <= 1 else free_s,
            weight_s=tuple(weight_s),
        )


_SHARED_BY_SHARDINGS = (
    "placement",
    "layers",
    "parameters",
    "trained_parameters",
    "rank_parameters",
    "trained_rank_parameters",
    "device_bytes",
    "pieces",
    "recompute_s",
    "costs",
)
"""Cached members of ``Placed`` that are equal for all shardings."""
_FIXED_SHARES = (0.4, 0.6)
"""Shares of forward and backward in the fixed seconds of a micro-batch. An assumption: calibrations determine only
their sum, and a backward launches more kernels than a forward."""


# Many runs of a search have the same parts; with the same objects, caches whose keys contain them are fast.
@lru_cache(maxsize=4096)
def _parts(cluster: Cluster, size: int, pp: int, order: tuple[int, ...] | None) -> tuple[Cluster, ...]:
    return tuple(cluster.part(place_of(rank, order) * size, size) for rank in range(pp))


@lru_cache(maxsize=4096)
def _kinds(cluster: Cluster, size: int, pp: int, order: tuple[int, ...] | None) -> tuple[Cluster, ...]:
    return tuple(dict.fromkeys(_parts(cluster, size, pp, order)))


def seconds_of_parts(seconds: Callable[..., float], parts: Iterable[Cluster], *values: Iterable[float]) -> list[float]:
    """``seconds`` of each part of a cluster and its values, computed once for equal ones.

    Args:
        seconds: part and its values -> seconds.
        parts: of ``Placed.parts``.
        values: one for each part.
    """
    places = list(zip(parts, *values, strict=True))
    # Most ranks are equal. By identity: equal parts are one object, and their hash takes longer.
    keys = [(id(part), *own) for part, *own in places]
    found = {key: seconds(*place) for key, place in dict(zip(keys, places, strict=True)).items()}
    return [found[key] for key in keys]


def _layers_s(placed: Placed) -> list[tuple[float, float]]:
    """For each stage the seconds of its layers, forward and backward, each by what it recomputes and sees."""
    stages = layers_by_kind(placed.run, placed.software)
    trained = layers_by_kind(placed.run, placed.software, trained=True)
    # By identity: the hash of a run takes long, and equal runs that are two objects are seldom.
    kinds = {
        id(alike): alike for each in {id(each): each for each in (*stages, *trained)}.values() for alike, _ in each
    }
    each_s = {key: [pieces.layer for pieces in placed.of(alike).pieces] for key, alike in kinds.items()}
    frozen_s = each_s
    if placed.run.adapter is not None:  # layers that train nothing have no adapters
        bare = {key: replace(alike, adapter=None) for key, alike in kinds.items()}
        frozen_s = {key: [pieces.layer for pieces in placed.of(alike).pieces] for key, alike in bare.items()}
    if placed.software.gathers_layers:
        # A layer's collectives run while the layer before computes.
        moves = [layer_collectives_s(placed.run, part, placed.software) for part in placed.parts]
        each_s = {
            key: [
                (together_s(one, move[0]), together_s(other, move[1]))
                for (one, other), move in zip(both, moves, strict=True)
            ]
            for key, both in each_s.items()
        }

    def seconds(stage: StageKinds, going_back: StageKinds, rank: int) -> tuple[float, float]:
        forward_s = sum(count * frozen_s[id(alike)][rank][0] for alike, count in stage)
        for alike, count in going_back:
            forward_s += count * (each_s[id(alike)][rank][0] - frozen_s[id(alike)][rank][0])
        return forward_s, sum(count * each_s[id(alike)][rank][1] for alike, count in going_back)

    ranks = (0,) * placed.run.num_stages if placed.has_equal_ranks else placed.placement.rank_by_stage
    places = {
        (id(one), id(other), rank): (one, other, rank) for one, other, rank in zip(stages, trained, ranks, strict=True)
    }
    found = {key: seconds(*place) for key, place in places.items()}  # most stages are equal
    return [found[id(one), id(other), rank] for one, other, rank in zip(stages, trained, ranks, strict=True)]


def _with_coding(placed: Placed, seconds: list[float], direction: int) -> list[float]:
    """Seconds of the stages in one direction with those of coding what they send, and of decoding what they receive."""
    if placed.run.boundary is None:
        return seconds
    coding_s = [coding_s_of(placed.run, part, placed.software) for part in placed.parts]
    owner, first_trained = placed.placement.rank_by_stage, num_frozen_stages(placed.run, placed.software)
    for stage in range(placed.run.num_stages - 1):
        # No gradient goes below the first stage that is trained.
        if placed.placement.crosses(stage) and (direction == 0 or stage >= first_trained):
            sender, receiver = (stage, stage + 1) if direction == 0 else (stage + 1, stage)
            seconds[sender] += coding_s[owner[sender]][0]
            seconds[receiver] += coding_s[owner[receiver]][1]
    return seconds


def _boundary_s(placed: Placed) -> tuple[float, ...]:
    """For each boundary between consecutive stages the seconds of one message."""
    pairs = list(pairwise(placed.placement.rank_by_stage))
    run = placed.run
    if pairs and run.pipeline_order is None and len(placed.cluster.kinds(run.num_devices)) == 1:
        # All boundaries count as the slowest.
        return (_transfer_s(placed, placed.route(*pairs[0]), is_inside=is_inside(placed, *pairs[0])),) * len(pairs)
    routes = {pair: (placed.route(*pair), is_inside(placed, *pair)) for pair in set(pairs)}
    of_route = {route: _transfer_s(placed, route[0], is_inside=route[1]) for route in dict.fromkeys(routes.values())}
    of_pair = {pair: of_route[route] for pair, route in routes.items()}
    return tuple(of_pair[pair] for pair in pairs)


def is_inside(placed: Placed, one: int, other: int) -> bool:
    """Whether messages between two pipeline ranks stay inside a node.

    Without ``pipeline_order`` all boundaries count as the slowest, which limits the pipeline.
    """
    if placed.run.pipeline_order is None:
        return placed.run.num_devices <= placed.route(one, other).devices_per_node
    return placed.are_near(one, other)


def _tied_message_s(placed: Placed) -> tuple[float, float]:
    """Seconds of sending a tied matrix from the first stage's rank to the last stage's, and its gradient back.

    Each device sends its slice. 0 for programs without these messages; ``step_terms`` has their reduction.
    """
    run, software, ends = placed.run, placed.software, tied_ranks(placed.run)
    if ends is None or not software.lends_tied:
        return 0.0, 0.0
    route, inside = placed.route(*ends), is_inside(placed, *ends)
    use, sharing = software.efficiency, route.sharing(run.stage_devices)
    held = run.shape.embedding_parameters / run.tp
    weights_s, gradient_s = (
        route.p2p_s(held * size, is_inside=inside, sharing=sharing, efficiency=use.p2p) + use.exchange_s
        for size in (run.element_bytes, software.gradient_bytes)
    )
    return weights_s, gradient_s


def _transfer_s(placed: Placed, route: Cluster, *, is_inside: bool) -> float:
    """Seconds of a message between adjacent pipeline ranks, whose global ranks differ by ``stage_devices``.

    Between nodes a device sends through its own adapter only (``Cluster.sharing``).
    """
    run, software = placed.run, placed.software
    if run.pp == 1:
        return 0.0
    measured_s = piece_seconds(run, route, software).message_s
    # Processes that share cores copy messages themselves; the seconds of a core for that were measured.
    if is_inside and measured_s:
        return measured_s * run.sent_bytes() / (run.sent_numbers() * run.element_bytes)
    message = run.sent_bytes(scatters=software.scatter_gather)
    use, sharing = software.efficiency, route.sharing(run.stage_devices)
    seconds = route.p2p_s(message, is_inside=is_inside, sharing=sharing, efficiency=use.p2p)
    # A program that is not ``is_both_ways`` sends and receives one after the other.
    return (seconds + use.exchange_s) * (1 if software.is_both_ways else 2)


@dataclass(frozen=True)
class OfPlaced:
    """Base class of values about a placed run.

    Attributes:
        placed: the run.
    """

    placed: Placed

    @property
    def run(self) -> Run:
        """Model and layout."""
        return self.placed.run

    @property
    def cluster(self) -> Cluster:
        """Where it runs."""
        return self.placed.cluster

    @property
    def software(self) -> Software:
        """The training program."""
        return self.placed.software
