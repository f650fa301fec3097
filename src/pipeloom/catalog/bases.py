"""Data files that begin with another one: ``base = "dgx-h100"`` takes its values, and the file writes the changes."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pipeloom.catalog.reading import find_name, read_toml
from pipeloom.config.paths import expand_home, names_file
from pipeloom.errors import UserError

_OWN = ("name", "source", "recipe")
"""Keys that a file does not take from its base: they identify the base, or its training."""
_MEASURED = {
    "device": ("pieces", "update"),
    "intra": ("collectives", "bus"),
    "inter": ("bus",),
    "adapters_per_node": ("bus",),
    "cores_per_node": ("collectives", "pieces", "update"),
    "devices_per_node": ("collectives", "bus"),
}
"""Key of a cluster -> what was measured on the base's machine and does not hold if the key changes."""
_DEVICE_SPEED = {"peak_tflop_per_s", "memory_gb_per_s", "matmul_gflop", "matmul_fraction", "matmul_fraction_of"}
"""Keys of a device that its measured errors depend on."""


def read_based(folder: str, name_or_path: str, known: Collection[str] = ()) -> tuple[dict[str, Any], str]:
    """``read_toml`` with the values of the base, of its base, and so on.

    Tables of both are merged; any other value of the file replaces that of the base. The name is the file's own. Where
    the file changes a machine, measured curves and pieces of the base are left out, and a device whose speed changes
    has a name of its own, so that the errors that were measured on the base's device are not claimed for it.

    Raises:
        UserError: there is no such name or file, or bases form a circle.
    """
    return _read(folder, name_or_path, known, ())


def _read(folder: str, named: str, known: Collection[str], seen: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    table, source = read_toml(folder, named, known)
    place = source if find_name(folder, source) is not None else str(Path(source).resolve())
    if place in seen:
        raise UserError(f"{source}: base leads back to itself: {' -> '.join([*seen, place])}")
    if "base" not in table:
        return table, source
    base = table.pop("base")
    if not isinstance(base, str):
        raise UserError(f"{source}: base must be a name of the catalog or a file, found {base!r}")
    if "groups" in table:
        raise UserError(f"{source}: a file with groups cannot have a base; each group has its own cluster")
    if names_file(base):
        base = str(Path(source).parent / expand_home(Path(base)))
    below, _ = _read(folder, base, known, (*seen, place))
    if "groups" in below:
        raise UserError(f"{source}: base must have nodes of one kind, found {base}, which has groups")
    return _changed(below, table), source


def _changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    stale = {name for key in changes for name in _MEASURED.get(key, ())}
    kept = {key: value for key, value in base.items() if key not in {*stale, *_OWN}}
    merged = _merged(kept, changes)
    device = changes.get("device")
    if isinstance(device, dict) and "name" not in device and _DEVICE_SPEED & set(device):
        merged["device"]["name"] = f"{base['device']['name']}, changed"
    return merged


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(base[key], value)
        for key, value in changes.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return {**base, **changes, **both}
