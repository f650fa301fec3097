"""The table of measurements: each row is the measured training step of one layout."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pipeloom.errors import ConfigError, UserError
from pipeloom.system.files import read_text
from pipeloom.workload.axes import AXES
from pipeloom.workload.dtypes import Precision, Products
from pipeloom.workload.layout import Recompute, Shard
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Attention, Run

VOCABULARIES = {"zero-bubble-": 32_000}
"""Beginning of a set's name -> vocabulary of its runs, where tables have another. arXiv 2401.10241 calls 46 layers of
5,120 14.6B and 62 of 6,144 28.3B, and its program's sample has a tokenizer of LLaMA's kind; with 50,257 tokens they
would be 14.7B and 28.4B, and the last stage of its 1.5B would take 10 % longer than it was measured."""
_SHAPE_COUNTS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
_RUN_COUNTS = ("seq", *AXES, "replicate", "loops", "micro_batch", "global_batch")
_IN_NOTES = ("cp", "replicate")
"""Columns that a table may leave out: then an item such as ``cp=2`` of the note, between semicolons, has the value."""
_IN_NODE = "within a node"
"""Words of a note that, without a column ``replicate``, mean hybrid sharding over the devices of a node."""
_OVER_RANKS = re.compile(r"sharded over (\d+) ranks")
"""Words of a note that, without a column ``replicate``, mean hybrid sharding over so many data-parallel ranks."""
_NETWORK = re.compile(r"(?:(?P<adapters>\d+) x )?(?P<gigabits>\d+) Gb/s(?P<per_device>[^;]* per GPU)?")
"""Words of a note that state the network of a node, such as ``4 x 100 Gb/s``, or that of a device (``per GPU``)."""
_COUNTS = (*_SHAPE_COUNTS, *_RUN_COUNTS, "devices", "devices_per_node")
_RUN_CHOICES = ("shard", "recompute", "attention", "precision")
_RUN_FLAGS = ("sequence_parallel", "fused_norm")
_FLAGS = ("tied", *_RUN_FLAGS)
_TEXTS = ("set", "status", "step_time_s", "memory_bytes", "model", "mlp", "device", "schedule", "note")
COLUMNS = tuple(name for name in (*_TEXTS, *_COUNTS, *_FLAGS, *_RUN_CHOICES) if name not in _IN_NOTES)
"""Columns that a table must have."""

_STATUSES = ("ok", "oom")
_FAMILIES = {"gelu": "gpt2", "swiglu": "llama"}
"""Feed-forward block, as in the column ``mlp`` -> family of models."""
_MODELED: dict[str, tuple[str, ...]] = {
    "shard": get_args(Shard),
    "recompute": get_args(Recompute),
    "attention": get_args(Attention),
    "precision": (*get_args(Precision), *get_args(Products)),
    "mlp": tuple(_FAMILIES),
}
"""Column -> what can be predicted of it. A program may well have another kernel or precision."""
_WORDS = (*_MODELED, "status", "schedule", "device")
"""Columns whose values may be in any case."""
_MOST_PROBLEMS = 20

BLANKS: dict[str, str] = {
    "cp": "1",
    "replicate": "1",
    "loops": "1",
    "devices_per_node": "8",
    "mlp": "gelu",
    "tied": "0",
    "shard": "none",
    "recompute": "none",
    "sequence_parallel": "0",
    "attention": "flash2",
    "fused_norm": "1",
    "precision": "bf16",
}
"""Column -> value of a blank cell. Others follow from the row: ``kv_heads`` is ``heads``, ``ffn`` four times
``hidden``, ``devices`` the product of the axes, ``schedule`` 1f1b with a pipeline, ``status`` ok if measured."""


class Group(NamedTuple):
    """What layouts have in common that are compared with each other.

    Kernels are included, since an attention kernel is not a part of a layout. Sequence parallelism, recomputation,
    sharding and the schedule are not: they are chosen with the layout.
    """

    set_name: str
    model: str
    seq: int
    devices: int
    global_batch: int
    attention: str
    fused_norm: bool
    precision: str


class Network(NamedTuple):
    """The network of a row's machine, as its note states it.

    Attributes:
        adapters: of a node; 0 if the note states only their bandwidth together.
        bytes_per_s: in one direction, of a node, or of each device if ``is_per_device``.
        is_per_device: whether it is a device's part.
    """

    adapters: int
    bytes_per_s: float
    is_per_device: bool


@dataclass(frozen=True)
class Row:
    """One measured layout.

    Attributes:
        set_name: name of its set of measurements.
        run: model and layout.
        schedule: the pipeline schedule, by the table's name.
        device: name of the device.
        is_ok: whether it ran; otherwise it ran out of memory.
        step_time_s: measured; ``None`` if not reported.
        memory_bytes: measured peak of the fullest device; ``None`` if not reported.
        note: remarks.
    """

    set_name: str
    run: Run
    schedule: str
    device: str
    is_ok: bool
    step_time_s: float | None
    memory_bytes: float | None
    note: str

    @property
    def network(self) -> Network | None:
        """The network that the note states; ``None`` if it states none."""
        found = _NETWORK.search(self.note)
        if found is None:
            return None
        adapters = int(found["adapters"] or 0)
        return Network(adapters, (adapters or 1) * int(found["gigabits"]) * 1e9 / 8, found["per_device"] is not None)

    @property
    def group(self) -> Group:
        """The group of comparable layouts that it belongs to."""
        run = self.run
        return Group(
            set_name=self.set_name,
            model=run.shape.name,
            seq=run.seq,
            devices=run.num_devices,
            global_batch=run.global_batch,
            attention=run.attention,
            fused_norm=run.fused_norm,
            precision=run.peak_precision,
        )


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV file, as column -> cell.

    Raises:
        UserError: the file cannot be read, has no rows, or lacks one of ``columns``.
    """
    text = read_text(path, "the table")
    try:
        # newline="": the csv module handles line ends itself, since quoted cells may contain some.
        reader = csv.DictReader(io.StringIO(text, newline=""))
        names, lines = reader.fieldnames or [], list(reader)
    except csv.Error as error:
        raise UserError(f"cannot read the table {path}: {error}") from error
    missing = [name for name in columns if name not in names]
    if missing:
        raise UserError(f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}")
    if not lines:
        raise UserError(f"{path} has a header and no rows")
    return [{key: (value or "").strip() for key, value in line.items() if key} for line in lines]


def read_rows(path: Path, skipped: dict[str, int] | None = None) -> list[Row]:
    """Read a table of measurements.

    Args:
        path: of the table.
        skipped: gets reason -> number of rows with kernels, precisions, sharding or recomputation that have no model,
            which are left out. ``None``: these are wrong cells.

    Raises:
        UserError: the file cannot be read, or is not such a table; a ``ConfigError`` lists wrong cells.
    """
    problems: list[str] = []
    rows: list[Row] = []
    # Line 1 is the header.
    for number, line in enumerate(read_table(path, COLUMNS), start=2):
        where, before = f"line {number}", len(problems)
        cells = _filled(line)
        values = _values(cells, where, problems)
        unknown = [
            f"{name} must be one of {', '.join(among)}, found '{cells[name]}'"
            for name, among in _MODELED.items()
            if cells[name] not in among
        ]
        if skipped is None:
            problems += [f"{where}: {reason}" for reason in unknown]
        if len(problems) > before:
            continue
        if unknown and skipped is not None:
            skipped[unknown[0]] = skipped.get(unknown[0], 0) + 1
        else:
            rows.append(_make(cells, values))
    if problems:
        rest = len(problems) - _MOST_PROBLEMS
        more = [f"and {rest} more"] if rest > 0 else []
        raise ConfigError(problems[:_MOST_PROBLEMS] + more, str(path))
    return rows


def _filled(line: dict[str, str]) -> dict[str, str]:
    """The line with defaults in blank cells, where there are defaults."""
    noted = dict(item.strip().split("=", 1) for item in line["note"].split(";") if "=" in item)
    given = {**{name: noted.get(name, "") for name in _IN_NOTES}, **line}
    filled = {name: text or BLANKS.get(name, "") for name, text in given.items()}
    # Tables differ in the case of words: BF16, H100-SXM-80GB.
    filled |= {name: filled[name].lower() for name in _WORDS}
    filled["device"] = filled["device"].replace(" ", "-")
    if not given["replicate"]:
        filled["replicate"] = _replicas_of(line["note"], filled)
    filled["kv_heads"] = filled["kv_heads"] or filled["heads"]
    filled["schedule"] = filled["schedule"] or ("none" if filled["pp"] == "1" else "1f1b")
    if not filled["status"] and (filled["step_time_s"] or filled["memory_bytes"]):
        filled["status"] = "ok"
    try:
        filled["ffn"] = filled["ffn"] or str(4 * int(filled["hidden"]))
        filled["devices"] = filled["devices"] or str(prod(int(filled[name]) for name in AXES))
    except ValueError:
        pass  # _values reports cells that are not numbers
    return filled


def _replicas_of(note: str, cells: dict[str, str]) -> str:
    """The number of copies of what data parallelism shards, by the note; 1 if cells are wrong, reported elsewhere."""
    try:
        if found := _OVER_RANKS.search(note):
            return str(max(1, int(cells["dp"]) // int(found[1])))
        if _IN_NODE in note:
            held = prod(int(cells[name]) for name in AXES if name != "pp")
            return str(max(1, held // int(cells["devices_per_node"])))
    except (ValueError, ZeroDivisionError):
        pass
    return "1"


def _values(line: dict[str, str], where: str, problems: list[str]) -> dict[str, Any]:
    """The values of the cells; wrong ones are added to ``problems``."""
    before = len(problems)

    def cell(name: str, convert: Callable[[str], Any], wanted: str) -> Any:
        try:
            return convert(line[name])
        except ValueError:
            problems.append(f"{where}: {name} must be {wanted}, found '{line[name]}'")
            return None

    values: dict[str, Any] = {name: cell(name, _count, "a whole number of at least 1") for name in _COUNTS}
    values |= {name: cell(name, _flag, "0 or 1") for name in _FLAGS}
    values |= {name: line[name] for name in _MODELED}
    if line["status"] not in _STATUSES:
        problems.append(f"{where}: status must be one of {', '.join(_STATUSES)}, found '{line['status']}'")
    for name in ("step_time_s", "memory_bytes"):
        values[name] = cell(name, _positive, "a number above 0 or blank")
    if len(problems) == before:
        _check_sizes(values, where, problems)
    return values


def _check_sizes(values: dict[str, Any], where: str, problems: list[str]) -> None:
    product = prod(values[name] for name in AXES)
    if product != values["devices"]:
        problems.append(f"{where}: {' x '.join(AXES)} is {product}, found devices {values['devices']}")
    if values["dp"] % values["replicate"]:
        problems.append(f"{where}: replicate {values['replicate']} must divide dp {values['dp']}")
    if values["hidden"] % values["heads"]:
        problems.append(f"{where}: hidden {values['hidden']} must be divisible by heads {values['heads']}")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _positive(text: str) -> float | None:
    if not text:
        return None
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _make(line: dict[str, str], values: dict[str, Any]) -> Row:
    sizes = {name: values[name] for name in (*_SHAPE_COUNTS, "tied")}
    for begin, vocab in VOCABULARIES.items():
        if line["set"].startswith(begin):
            sizes["vocab"] = vocab
    shape = ModelShape(name=line["model"], family=_FAMILIES[values["mlp"]], **sizes)
    of_run = {name: values[name] for name in (*_RUN_COUNTS, *_RUN_CHOICES, *_RUN_FLAGS)}
    if of_run["precision"] in get_args(Products):
        of_run |= {"precision": "bf16", "products": of_run["precision"]}
    return Row(
        set_name=line["set"],
        run=Run(shape=shape, **of_run),
        schedule=line["schedule"],
        device=line["device"],
        is_ok=line["status"] == "ok",
        step_time_s=values["step_time_s"],
        memory_bytes=values["memory_bytes"],
        note=line["note"],
    )
