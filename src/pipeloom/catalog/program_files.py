"""Files of training programs: facts about their execution, and calibrated efficiencies."""

from dataclasses import fields
from typing import Any, cast, get_args

from pipeloom.catalog.reading import Reader, read_toml
from pipeloom.cost.software import FRACTIONS, SHARES, Division, Efficiency, Software
from pipeloom.families import FAMILIES
from pipeloom.workload.layout import Shard, StrategyName

GENERAL = "general"
"""The program of the catalog whose efficiencies are the medians of those that were calibrated."""


def load_software(name_or_path: str) -> Software:
    """A training program by name (``pipeloom/catalog/software``) or from a file.

    A file without efficiencies has those of ``GENERAL``.

    Raises:
        UserError: there is no such name or file, or the file is wrong; has all problems.
    """
    table, source = read_toml("software", name_or_path)
    reader = Reader(table, source)
    calibrated, default = reader.table("efficiency", is_optional=True), Software(name="")
    known = {item.name for item in fields(Efficiency)}
    values = {key: _efficiency(calibrated, key) for key in calibrated.names() if key in known}
    plain = {
        item.name: _plain(reader, item.name, getattr(default, item.name))
        for item in fields(Software)
        # By the type of the default, so that a new attribute of Software needs no code here.
        if isinstance(getattr(default, item.name), bool | int | float)
    }
    software = Software(
        name=reader.text("name"),
        partition=cast("Division", reader.text("partition", "even", among=get_args(Division))),
        # What nobody calibrated reaches what measured programs reach on average.
        efficiency=Efficiency(**values) if "efficiency" in table else load_software(GENERAL).efficiency,
        cluster=reader.text("cluster", default.cluster),
        sets=reader.texts("sets"),
        attentions=reader.texts("attentions"),
        drain_models=reader.texts("drain_models"),
        families=reader.texts("families", among=FAMILIES),
        strategies=reader.texts("strategies", among=get_args(StrategyName)),
        shards=cast("tuple[Shard, ...]", reader.texts("shards", among=get_args(Shard))),
        **plain,
    )
    calibrated.check()
    reader.check({"source", "provenance", "spread"})
    return software


def load_spread(name_or_path: str) -> dict[str, float]:
    """How far the efficiencies of programs differ: efficiency -> standard deviation of its logarithm.

    Args:
        name_or_path: as for ``load_software``; empty for a file without a table ``spread``.

    Raises:
        UserError: there is no such name or file, or the table is wrong.
    """
    table, source = read_toml("software", name_or_path)
    reader = Reader(table, source).table("spread", is_optional=True)
    known = {item.name for item in fields(Efficiency)}
    found = {name: reader.number(name) for name in reader.names() if name in known}
    reader.check()
    return found


def _efficiency(reader: Reader, key: str) -> float:
    return reader.fraction(key, most=FRACTIONS[key]) if key in FRACTIONS else reader.number(key)


def _plain(reader: Reader, key: str, default: Any) -> Any:
    if isinstance(default, bool):
        return reader.flag(key, default=default)
    if key in SHARES:
        return reader.fraction(key, default, is_zero_allowed=True)
    return reader.number(key, default)
