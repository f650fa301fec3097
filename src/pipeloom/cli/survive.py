"""``pipeloom survive``: what failures of nodes leave of a training, and how often to write checkpoints."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from rich.progress import TextColumn, TimeElapsedColumn

from pipeloom.cli.flags import SOURCE
from pipeloom.cli.idle import beside, with_idle_check, without
from pipeloom.cli.layout_tables import short_cells, table_of_cells
from pipeloom.cli.plan_json import step_to_json
from pipeloom.cli.reference import Command
from pipeloom.cli.run_config import PREDICTIONS, parse_config
from pipeloom.config import RunConfig
from pipeloom.errors import ConfigError
from pipeloom.planner.fewer_nodes import OnNodes, Ways, fewer_replicas, launcher_of, nodes_of, planned, waits
from pipeloom.planner.goals import DAY_S, SPANS, amount_or_note
from pipeloom.planner.left_out import unpriced
from pipeloom.planner.peers import Served, Swarm, serve
from pipeloom.planner.survival import Event, Goodput, Stops, best_interval_s, numbers_up, random_events, walk
from pipeloom.predict.describe import describe, described_problems
from pipeloom.predict.need import checkpoint_bytes
from pipeloom.predict.step import SimulatedStep
from pipeloom.system.files import read_text
from pipeloom.terminal.console import table
from pipeloom.terminal.progress import Bar
from pipeloom.terminal.sections import Section, print_sections
from pipeloom.terminal.words import count, percent
from pipeloom.workload.limits import Common, CountOrNone, Positive

_COLUMNS = ("useful", "slower", "checkpoints", "repeated", "restarts", "waiting")
_SHOWN = 3
"""Numbers of nodes below that of the run whose layouts are printed; fewer are up seldom."""
_HEAD = ("hours", "node", "state")
_Moves = tuple[float, float | None]
"""Seconds between moves of peers, and of one move; ``None``: those of the state over the network."""
_FAILURES = 2000
"""Failures of a random walk: the mean of that many independent ones has a standard error of 2 % of what they cost."""


@dataclass(frozen=True, kw_only=True)
class Options(RunConfig):
    """Options of ``pipeloom survive``.

    Goodput is the share of time in which the run makes the progress of the fastest layout on all its nodes: its own, or
    that of the planner. Failures of nodes are random, or those of a file. Three ways to continue are compared: wait for
    the node, use fewer replicas of the pipeline, and plan another layout for the nodes that are up. All start again
    from the last checkpoint; any layout reads it.
    --rebalance-every adds a simulation of peers that come and go while the others continue, which train cannot do.
    """

    mtbf: Common[str | None] = None
    """Mean time between failures of one node, such as 4000h, 180d or 1y. One of --mtbf and --trace is needed."""
    trace: Common[Path | None] = None
    """Table of failures instead of random ones: a CSV file with the columns hours, node (from 0), state (up or
    down), in the order of the hours."""
    repair_time: Common[str] = "1d"
    """With --mtbf: mean time until a node that failed is back."""
    spares: Common[CountOrNone] = 0
    """Nodes that stand ready to replace others."""
    checkpoint_time: Common[str | None] = None
    """Time that steps wait for a checkpoint, such as 20s or 3min. None: of the state of a node with --storage."""
    storage: Positive | None = None
    """GB/s with which all nodes together write checkpoints, where --checkpoint-time is not given."""
    rebalance_every: str | None = None
    """Also simulate nodes as peers that each serve a pipeline rank and come and go one by one, as in SWARM: with and
    without moving a peer of the richest stage to the poorest one so often, such as every 5min."""
    move_time: str | None = None
    """Time until a peer has the state of another pipeline rank. None: of its bytes over the network between nodes."""
    restart_time: Common[str] = "10min"
    """Time from a failure to the next step: until it is noticed, the start of the processes, the checkpoint read."""
    budget_s: Positive = 10.0
    """Seconds of the planner for each number of nodes."""
    json: Common[bool] = False
    """Print JSON for programs."""


def _without_plans(options: Options) -> str:
    kept = unpriced(options)
    return f"with {' and '.join(kept)}, of which no layout is planned" if kept else ""


COMMAND = Command(
    name="survive",
    options=Options,
    examples={
        "pipeloom survive run.toml --mtbf 1y --checkpoint-time 20s": "nodes that fail once a year",
        "pipeloom survive run.toml --trace failures.csv --checkpoint-time 20s": "failures of a file",
        "pipeloom survive run.toml --mtbf 8h --repair-time 1h --checkpoint-time 20s --rebalance-every 5min": "SWARM",
    },
    settings=PREDICTIONS,
    brief=("model.preset", "layout.pp", "layout.dp", "machine.cluster"),
    idle={
        "repair_time": (beside("trace"),),
        "move_time": (without("rebalance_every"),),
        "budget_s": (_without_plans,),
    },
)


@dataclass(frozen=True, kw_only=True)
class _Hazard:
    """When nodes fail.

    Attributes:
        events: by time.
        mtbf_s: of one node.
        num_nodes: with the spares.
        span_s: length of the walk.
        words: for the heading.
    """

    events: list[Event]
    mtbf_s: float
    num_nodes: int
    span_s: float
    words: str


def run(words: list[str]) -> int:
    """Parse, walk over the failures once for each way to continue, print."""
    options = parse_config(COMMAND, words, with_idle_check(COMMAND, words, described_problems))
    hazard, checkpoint_s, restart_s, moves = _inputs(options)
    own = waits(options)(nodes_of(options))
    assert own.step is not None
    # Less often than once a step is not possible.
    interval_s = max(best_interval_s(hazard.mtbf_s / own.num_nodes, checkpoint_s), own.step_s)
    stops = Stops(checkpoint_s=checkpoint_s, restart_s=restart_s, interval_s=interval_s)
    numbers = sorted(numbers_up(hazard.events, hazard.num_nodes))
    ways = {"wait for the node": waits(options), "fewer replicas": fewer_replicas(options)}
    if not unpriced(options):
        ways["planned anew"] = planned(options, options.budget_s, numbers, ways["fewer replicas"])
    layouts = {name: _layouts(way, numbers, name) for name, way in ways.items()}
    fastest_s = min(on.step_s for each in layouts.values() for on in each.values())
    walks = [_walk(hazard, name, each, stops, fastest_s) for name, each in layouts.items()]
    swarm = None if moves is None else _swarm(options, own.step, *moves)
    served = () if swarm is None else _served(hazard, swarm)
    if options.json:
        print(json.dumps(_to_json(options, hazard, stops, walks, served)))
    else:
        sections = _sections(options, hazard, stops, walks, own.step_s)
        print_sections(sections if swarm is None else [*sections, _peers_section(swarm, served)])
    return 0


@dataclass(frozen=True)
class _Walked:
    """A walk over the failures.

    Attributes:
        name: of the way to continue.
        goodput: of the walk.
        layouts: number of nodes that were up -> what ran on them.
        fastest_s: seconds of the fastest step of all ways, relative to which speeds are.
    """

    name: str
    goodput: Goodput
    layouts: dict[int, OnNodes]
    fastest_s: float


def _layouts(way: Ways, numbers: Sequence[int], name: str) -> dict[int, OnNodes]:
    columns = (TextColumn(f"{name}: {{task.fields[nodes]}}"), TimeElapsedColumn())
    found = dict[int, OnNodes]()
    with Bar(sys.stderr, *columns, total=1, transient=True, nodes="") as bar:
        for number in numbers:
            bar.update(0, nodes=count(number, "node"))
            found[number] = way(number)
    return found


def _walk(hazard: _Hazard, name: str, layouts: dict[int, OnNodes], stops: Stops, fastest_s: float) -> _Walked:
    def used(num_up: int) -> tuple[int, float]:
        return layouts[num_up].num_nodes, fastest_s / layouts[num_up].step_s

    goodput = walk(hazard.events, hazard.num_nodes, used, stops, hazard.span_s, mtbf_s=hazard.mtbf_s)
    return _Walked(name, goodput, layouts, fastest_s)


def _swarm(options: Options, step: SimulatedStep, every_s: float, move_s: float | None) -> Swarm:
    """Nodes as peers of the pipeline ranks of a step."""
    ranks = range(step.trace.num_ranks)
    if move_s is None:
        move_s = _state_bytes(options) / len(ranks) / step.cluster.inter.bytes_per_s
    work = tuple(float(step.trace.compute(rank).duration_s.sum()) for rank in ranks)
    return Swarm(work=work, move_s=move_s, every_s=every_s)


def _served(hazard: _Hazard, swarm: Swarm) -> tuple[Served, Served]:
    """What peers serve without and with moves between stages."""
    never, moved = (
        serve(hazard.events, hazard.num_nodes, one, hazard.span_s) for one in (replace(swarm, every_s=inf), swarm)
    )
    return never, moved


def _inputs(options: Options) -> tuple[_Hazard, float, float, _Moves | None]:
    """The failures, the seconds of a checkpoint and of a restart, and the moves of peers.

    Raises:
        ConfigError: everything that is wrong.
    """
    problems: list[str] = []
    such = "20s, 3min or 2h"
    restart_s = amount_or_note("--restart-time", options.restart_time, SPANS, such, problems)
    checkpoint_s = amount_or_note("--checkpoint-time", options.checkpoint_time, SPANS, such, problems)
    if (options.checkpoint_time is None) == (options.storage is None):
        found = "neither" if options.checkpoint_time is None else "both"
        problems.append(f"one of --checkpoint-time and --storage (GB/s) is needed, found {found}")
    if describe(options).cluster.num_devices is not None:
        problems.append("machine.cluster must have one kind of node, since any node may fail")
    hazard, moves = _hazard(options, problems), _moves(options, problems)
    if problems or hazard is None or restart_s is None:
        raise ConfigError(problems, SOURCE)
    if checkpoint_s is None:
        checkpoint_s = _state_bytes(options) / ((options.storage or inf) * 1e9)
    return hazard, checkpoint_s, restart_s, moves


def _moves(options: Options, problems: list[str]) -> _Moves | None:
    """The moves of peers; ``None`` without --rebalance-every."""
    every_s = amount_or_note("--rebalance-every", options.rebalance_every, SPANS, "5min or 1h", problems)
    move_s = amount_or_note("--move-time", options.move_time, SPANS, "60s or 5min", problems)
    if options.rebalance_every is None:
        return None
    layout, per_node = options.layout, describe(options).cluster.host_size
    nodes = [range(first, min(first + per_node, layout.num_ranks)) for first in range(0, layout.num_ranks, per_node)]
    if not layout.has_pipeline or any(len({layout.coordinates(rank).pipeline for rank in node}) > 1 for node in nodes):
        problems.append(
            "--rebalance-every takes each node as a peer of one pipeline rank: layout.pp must be at least 2 and the "
            f"{count(per_node, 'device')} of a node must have the same pipeline rank, found "
            f"{layout.axes.product('layout.')}; leave it out, or use more layout.dp"
        )
    return None if every_s is None else (every_s, move_s)


def _state_bytes(options: Options) -> float:
    """Bytes of a checkpoint, of all ranks."""
    placed = describe(options)
    return checkpoint_bytes(options, placed.run, placed.software)


def _hazard(options: Options, problems: list[str]) -> _Hazard | None:
    if (options.mtbf is None) == (options.trace is None):
        found = "neither" if options.mtbf is None else "both"
        problems.append(f"one of --mtbf and --trace is needed, found {found}")
        return None
    num_nodes = nodes_of(options) + options.spares
    if options.trace is not None:
        return _of_file(options.trace, num_nodes, problems)
    mtbf_s = amount_or_note("--mtbf", options.mtbf, SPANS, "4000h, 180d or 1y", problems)
    repair_s = amount_or_note("--repair-time", options.repair_time, SPANS, "6h or 1d", problems)
    if mtbf_s is None or repair_s is None:
        return None
    span_s = _FAILURES * (mtbf_s + repair_s) / num_nodes
    events = random_events(num_nodes, mtbf_s, repair_s, span_s)
    each = count(_FAILURES, "random failure")
    words = f"{each}: each node fails every {_span(mtbf_s)} in the mean, and is back after {_span(repair_s)}"
    return _Hazard(events=events, mtbf_s=mtbf_s, num_nodes=num_nodes, span_s=span_s, words=words)


def _of_file(path: Path, num_nodes: int, problems: list[str]) -> _Hazard | None:
    rows = list(csv.DictReader(read_text(path).splitlines()))
    if not rows or not set(_HEAD) <= rows[0].keys():
        problems.append(f"{path}: expected a line of names with {', '.join(_HEAD)}, and at least one line below")
        return None
    events, wrong = list[Event](), list(_events(rows, num_nodes))
    for number, event in enumerate(wrong, 2):
        if isinstance(event, str):
            problems.append(f"{path}, line {number}: {event}")
        else:
            events.append(event)
    if len(events) < len(wrong):
        return None
    if any(one.time_s > other.time_s for one, other in pairwise(events)):
        problems.append(f"{path}: the lines must be in the order of the hours")
        return None
    failures = sum(not event.is_up for event in events)
    if not failures or events[-1].time_s <= 0:
        problems.append(f"{path}: expected at least one node that goes down, after hour 0")
        return None
    span_s = events[-1].time_s
    words = f"{count(failures, 'failure')} of {path} in {_span(span_s)}"
    # Of the nodes that are up: the mean is an estimate, which only decides when a node that returns is used.
    return _Hazard(events=events, mtbf_s=span_s * num_nodes / failures, num_nodes=num_nodes, span_s=span_s, words=words)


def _events(rows: list[dict[str, str]], num_nodes: int) -> Iterator[Event | str]:
    up = set(range(num_nodes))
    for row in rows:
        hours, node, state = ((row[name] or "").strip() for name in _HEAD)
        try:
            event = Event(float(hours) * 3600, int(node), state == "up")
        except ValueError:
            yield f"hours and node must be numbers, found '{hours}' and '{node}'"
            continue
        if not 0 <= event.time_s < inf:
            yield f"hours must be at least 0 and finite, found {hours}"
        elif not 0 <= event.node < num_nodes:
            yield f"node must be 0 to {num_nodes - 1}, found {node}"
        elif state not in ("up", "down"):
            yield f"state must be up or down, found '{state}'"
        elif event.is_up == (event.node in up):
            yield f"node {node} is {state} already"
        else:
            up ^= {event.node}
            yield event


def _sections(options: Options, hazard: _Hazard, stops: Stops, walks: list[_Walked], step_s: float) -> list[Section]:
    nodes, job_s = nodes_of(options), hazard.mtbf_s / nodes_of(options)
    spares = f" and {count(options.spares, 'spare')}" if options.spares else ""
    shares = table("way to continue", _COLUMNS)
    for one in walks:
        shares.add_row(one.name, *(percent(one.goodput.shares[part]) for part in _COLUMNS))
    steps = round(stops.interval_s / step_s)
    head = [
        f"{hazard.words}; the run on {count(nodes, 'node')}{spares} fails every {_span(job_s)}",
        (
            f"best time between checkpoints: {_span(stops.interval_s)}, {count(steps, 'step')} of {step_s:.3g} s; "
            f"steps wait {_span(stops.checkpoint_s)} for one: --checkpoint.every-s "
            f"{stops.interval_s:.0f}"
        ),
        *_on_plans(options, walks[-1].layouts.values()),
    ]
    words = (
        "Shares of the time. useful is the goodput: progress at the speed of the fastest layout on all nodes. slower "
        "is lost where steps take longer than with that one, repeated are steps since the last checkpoint, waiting is "
        "time with too few nodes for any layout of that way."
    )
    fastest_s = walks[0].fastest_s
    if fastest_s < step_s:
        head.append(
            f"the layout of the run takes {percent(step_s / fastest_s - 1)} longer than the fastest that the planner "
            f"finds on {count(nodes, 'node')}, {fastest_s:.3g} s; while the run has its own layout, this time counts "
            "as slower"
        )
    parts = [Section(parts=[head]), Section("Goodput", parts=[shares, words], is_wide=True)]
    if rows := {
        f"{number:,} up, {name}": {
            "nodes": str(on.num_nodes),
            "speed": percent(fastest_s / on.step_s),
            **short_cells(step),
        }
        for number, name, on, step in _shown_layouts(nodes, walks)
    }:
        parts.append(Section("Layouts", parts=[table_of_cells("", rows)], is_wide=True))
    return parts


def _shown_layouts(nodes: int, walks: list[_Walked]) -> Iterator[tuple[int, str, OnNodes, SimulatedStep]]:
    """Number of nodes that are up, way to continue, what it runs on them, and its step, for those that have one."""
    for number in range(nodes, max(-1, nodes - 1 - _SHOWN), -1):
        for one in walks:
            if (on := one.layouts.get(number)) is not None and on.step is not None:
                yield number, one.name, on, on.step


def _on_plans(options: Options, layouts: Iterable[OnNodes]) -> Iterator[str]:
    """Why no layout is planned anew, or for which other program, and whether longer searches may find faster ones."""
    if refused := unpriced(options):
        yield from (f"no layout is planned anew: {reason}" for reason in refused.values())
        return
    launcher = launcher_of(options, describe(options))
    if not launcher.is_own:
        yield f"layouts are planned anew for {launcher.title}: only what it can run"
    if not all(one.is_proved for one in layouts):
        yield (
            f"for some numbers of nodes the search was cut short after {options.budget_s:g} s; a larger --budget-s may "
            "find faster layouts"
        )


def _peers_section(swarm: Swarm, served: Sequence[Served]) -> Section:
    """What peers that come and go serve, with and without rebalancing."""
    never, moved = served
    found = table("peers move", ("of those up", "of all", "moves", "a stage without peers"))
    for name, one in (("never", never), (f"every {_span(swarm.every_s)}", moved)):
        shares = percent(one.share), percent(one.done / one.of_all)
        found.add_row(name, *shares, f"{one.num_moves:,}", _span(one.empty_s))
    found.add_row(
        "best division", percent(moved.of_whole / moved.of_up), percent(moved.of_whole / moved.of_all), "", ""
    )
    words = (
        f"A simulation: each node serves one of {count(len(swarm.work), 'pipeline rank')}, and the one with the fewest "
        f"nodes decides. A node that returns serves one at random, {_span(swarm.move_s)} later, with its state. Shares "
        "of the speed of the nodes that are up, and of all nodes, without checkpoints and averages. train has fixed "
        "ranks: it starts again on the nodes that are left, as above."
    )
    return Section("Peers that come and go", parts=[found, words], is_wide=True)


def _to_json(
    options: Options, hazard: _Hazard, stops: Stops, walks: list[_Walked], served: Sequence[Served]
) -> dict[str, Any]:
    """What ``--json`` prints, in seconds and fractions.

    Keys: ``num_nodes``, ``num_spares``, ``mtbf_s`` (of a node), ``span_s``, ``checkpoint_s``, ``restart_s``,
    ``best_interval_s``, ``fastest_step_s`` (of the layout at whose speed all time would be useful), ``ways`` (of each
    way to continue the shares of the time, and ``num_failures``), ``layouts`` (of each number of nodes ``num_up`` and
    ``way``: ``num_nodes`` that it uses, and the keys of a layout of ``pipeloom plan --json``), ``not_planned`` (why no
    layout is planned anew). With --rebalance-every also ``peers``: by ``never`` and ``rebalanced`` the share of the
    speed of the nodes that are up (``of_up``), of all nodes (``of_all``), ``num_moves``, and ``empty_s`` in which a
    pipeline rank had no node.
    """
    peers = {
        name: {"of_up": one.share, "of_all": one.done / one.of_all, "num_moves": one.num_moves, "empty_s": one.empty_s}
        for name, one in zip(("never", "rebalanced"), served, strict=False)
    }
    return {
        "num_nodes": nodes_of(options),
        "num_spares": options.spares,
        "mtbf_s": hazard.mtbf_s,
        "span_s": hazard.span_s,
        "checkpoint_s": stops.checkpoint_s,
        "restart_s": stops.restart_s,
        "best_interval_s": stops.interval_s,
        "fastest_step_s": walks[0].fastest_s,
        "ways": {one.name: {**one.goodput.shares, "num_failures": one.goodput.num_failures} for one in walks},
        "layouts": [
            {"num_up": number, "way": name, "num_nodes": on.num_nodes, **step_to_json(step)}
            for number, name, on, step in _shown_layouts(nodes_of(options), walks)
        ],
        "not_planned": list(unpriced(options).values()),
        **({"peers": peers} if peers else {}),
    }


def _span(value_s: float) -> str:
    """A time in the largest unit of which it has at least one."""
    units = {"days": DAY_S, "hours": 3600.0, "minutes": 60.0}
    unit = next((name for name, size in units.items() if value_s >= 2 * size), "s")
    return f"{value_s / units.get(unit, 1.0):.3g} {unit}"
