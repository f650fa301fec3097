"""``pipeloom catalog``: clusters, models and training programs that have names, with the sources of their numbers."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pipeloom.catalog import CLUSTERS, cluster_to_toml, load_cluster, load_model, load_software, names, source_of
from pipeloom.catalog.reading import text_of
from pipeloom.cli.flags import SOURCE, read_flags
from pipeloom.cli.reference import Command, Place
from pipeloom.cost.hardware import Cluster, usual_peak
from pipeloom.errors import ConfigError
from pipeloom.terminal.console import Columns, headed, print_table, table_of, wide_console
from pipeloom.terminal.guard import printable
from pipeloom.terminal.words import same_name, unknown_name
from pipeloom.workload.limits import Common

WIDTH = 100
"""Columns of the tables."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom catalog``.

    Without NAME prints a table; with it the entry as a file, whose comments have the sources of its numbers. The file
    may be copied and changed, or be the base of another one.
    """

    kind: Annotated[Literal["clusters", "models", "programs", "all"], Place("KIND")] = "all"
    """Entries to list. all: everything."""
    name: Annotated[str | None, Place("NAME")] = None
    """Entry to print, in any case."""
    json: Common[bool] = False
    """Print JSON for programs, in SI units."""


COMMAND = Command(
    name="catalog",
    options=Options,
    examples={
        "pipeloom catalog clusters": "a table of all clusters",
        "pipeloom catalog models llama-3-8b": "one model with its source",
    },
)


class _Kind(NamedTuple):
    """One kind of entries: their names, the folder of their files, and how they are read and shown."""

    what: str
    folder: str
    names: Callable[[], Collection[str]]
    load: Callable[[str], Any]
    columns: Columns
    record: Callable[[Any], dict[str, Any]]


def _of_cluster(cluster: Cluster) -> dict[str, Any]:
    device = cluster.device
    return {
        "device": device.name,
        "devices_per_node": cluster.devices_per_node,
        "peak_flops_per_s": usual_peak(device.peak_flops_per_s),
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "intra_bytes_per_s": cluster.intra.bytes_per_s,
        "inter_bytes_per_s": cluster.inter.bytes_per_s,
        "price_per_device_hour": cluster.price_per_device_hour,
    }


def _of_model(name: str) -> dict[str, Any]:
    shape = load_model(name)
    sizes = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    counts = {"parameters": shape.parameters, "active_parameters": shape.active_parameters}
    return {**counts, **{size: getattr(shape, size) for size in sizes}}


def _of_program(name: str) -> dict[str, Any]:
    program = load_software(name)
    return {"cluster": program.cluster, "families": program.families, "source": source_of("software", name)}


def _in(scale: float, digits: int = 0) -> Callable[[float], str]:
    return lambda value: f"{value / scale:,.{digits}f}"


def _joined(families: Sequence[str]) -> str:
    return ", ".join(families) or "all"


def _price(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


KINDS: Mapping[str, _Kind] = {
    "clusters": _Kind(
        "cluster",
        "clusters",
        lambda: list(CLUSTERS),
        load_cluster,
        {
            "device": ("device", str),
            "devices_per_node": ("a node", str),
            "peak_flops_per_s": ("TFLOP/s", _in(1e12, 1)),
            "memory_bytes": ("GB", _in(1e9)),
            "memory_bytes_per_s": ("GB/s", _in(1e9)),
            "intra_bytes_per_s": ("intra", _in(1e9)),
            "inter_bytes_per_s": ("inter", _in(1e9)),
            "price_per_device_hour": ("$/h", _price),
        },
        _of_cluster,
    ),
    "models": _Kind(
        "model",
        "models",
        lambda: names("models"),
        str,
        {
            "parameters": ("billions", _in(1e9, 1)),
            "active_parameters": ("of a token", _in(1e9, 1)),
            "family": ("family", str),
            **{size: (size, str) for size in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")},
        },
        _of_model,
    ),
    "programs": _Kind(
        "program",
        "software",
        lambda: names("software"),
        str,
        {
            "cluster": ("calibrated on", str),
            "families": ("schedules", _joined),
        },
        _of_program,
    ),
}
LEGEND = {
    "clusters": "TFLOP/s: peak in 16 bits, dense; intra: GB/s of a device inside a node; inter: GB/s of a node",
    "models": "billions: of parameters",
    "programs": "schedules: families that the program runs",
}


def run(words: list[str]) -> int:
    """Parse the arguments, print the entries."""
    options, problems = read_flags(COMMAND, words)
    name = _name(options, problems) if options.name is not None else None
    if problems:
        raise ConfigError(problems, SOURCE)
    chosen = list(KINDS) if options.kind == "all" else [options.kind]
    if name is not None:
        _print_entry(KINDS[options.kind], name, as_json=options.json)
    elif options.json:
        print(json.dumps({one: _records(KINDS[one]) for one in chosen}))
    else:
        for number, one in enumerate(chosen):
            _print_list(one, is_first=not number)
    return 0


def _name(options: Options, problems: list[str]) -> str | None:
    """The catalog's spelling of the name; ``None`` with a problem."""
    assert options.name is not None
    if options.kind not in KINDS:
        problems.append(f"NAME needs a kind: pipeloom catalog {'|'.join(KINDS)} {options.name}")
        return None
    kind = KINDS[options.kind]
    known = kind.names()
    found = options.name if options.name in known else same_name(options.name, known)
    if found is None:
        problems.append(unknown_name(kind.what, options.name, known))
    return found


def _records(kind: _Kind) -> dict[str, dict[str, Any]]:
    return {name: kind.record(kind.load(name)) for name in kind.names()}


def _print_list(which: str, *, is_first: bool) -> None:
    console = wide_console(WIDTH)
    if not is_first:
        console.print()
    console.print(headed(which))
    kind = KINDS[which]
    print_table(console, table_of(_records(kind), kind.columns, kind.what))
    console.print(LEGEND[which], style="dim")


def _print_entry(kind: _Kind, name: str, *, as_json: bool) -> None:
    text = text_of(kind.folder, name)
    if text is None:  # of a plug-in, which has no file
        text = cluster_to_toml(load_cluster(name))
    if not as_json:
        print(printable(text.rstrip("\n")))
        return
    value = kind.load(name)
    whole = asdict(value) if isinstance(value, Cluster) else {}
    print(json.dumps({"name": name, **kind.record(value), **whole, "file": text}))
