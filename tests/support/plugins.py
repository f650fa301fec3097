"""Distributions that exist for a test: a module and the entry point that names it, in a folder for ``sys.path``."""

from pathlib import Path


def write_plugin(folder: Path, module: str, code: str, points: dict[str, str], distribution: str | None = None) -> Path:
    """Write a module of a distribution with entry points; returns the module's file.

    Args:
        folder: which is then put on the path.
        module: its name.
        code: what is in it.
        points: group -> name of what the module adds.
        distribution: name; ``None`` for that of the module.
    """
    name = distribution or module
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    text = "".join(f"[{group}]\n{point} = {module}\n" for group, point in points.items())
    (metadata / "entry_points.txt").write_text(text)
    file = folder / f"{module}.py"
    file.write_text(code, encoding="utf-8")
    return file
