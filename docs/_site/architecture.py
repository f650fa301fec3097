"""The picture of the architecture: packages in rows, each above all that it imports, drawn from the import graph."""

import ast
from collections import defaultdict
from html import escape
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "pipeloom"
BASE = ("errors", "terminal", "system", "registry")
"""Packages that all others may use; drawn as one bar."""
TORCH = frozenset({"model", "data", "execute", "measure", "training"})
ROW, BOX, HEIGHT, GAP, MARGIN = 66.0, 104.0, 30.0, 18.0, 12.0
"""Distance of rows, width and height of a box, between boxes, at the border; all in pixels."""


def import_graph() -> dict[str, set[str]]:
    """Package or module of ``pipeloom`` -> those of its siblings that it imports, without the base."""
    graph: dict[str, set[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        if name in BASE or name.startswith("__"):
            continue
        targets = graph.setdefault(name, set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "pipeloom":
                modules = [f"pipeloom.{alias.name}" for alias in node.names]
            else:
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            targets |= {module.split(".")[1] for module in modules if module.startswith("pipeloom.")}
    # Names of pipeloom/__init__.py are no packages.
    return {name: {target for target in targets - {name} if target in graph} for name, targets in graph.items()}


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without edges that a longer way implies."""
    reach: dict[str, set[str]] = {}
    for name in sorted(graph, key=levels(graph).__getitem__):
        reach[name] = graph[name].union(*(reach[target] for target in graph[name]))
    return {
        name: {one for one in targets if not any(one in reach[other] for other in targets)}
        for name, targets in graph.items()
    }


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Row of each package: above all that it imports."""
    found: dict[str, int] = {}
    left = dict(graph)
    while left:
        ready = {name for name, targets in left.items() if targets <= found.keys()}
        if not ready:
            message = f"packages import each other in a circle: {', '.join(sorted(left))}"
            raise ValueError(message)
        found |= {name: 1 + max((found[target] for target in left[name]), default=-1) for name in ready}
        left = {name: targets for name, targets in left.items() if name not in ready}
    return found


def rows_and_paths(graph: dict[str, set[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Names by row, from the lowest, and each edge as names from row to row, with a point in each row that it passes.

    Neighbors are brought together by ordering each row by the mean place of what it is connected to.
    """
    level, paths = levels(graph), []
    rows: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for name in sorted(graph):
        rows[level[name]].append(name)
        for target in sorted(graph[name]):
            points = [f"{name}>{target}>{row}" for row in range(level[name] - 1, level[target], -1)]
            for point, row in zip(points, range(level[name] - 1, level[target], -1), strict=True):
                rows[row].append(point)
            paths.append([name, *points, target])
    beside: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for upper, lower in pairwise(path):
            beside[upper].append(lower)
            beside[lower].append(upper)
    for _ in range(40):
        for row in rows:
            place = {name: x for other in rows for name, x in positions(other).items()}
            row.sort(key=lambda name: sum(place[one] for one in beside[name]) / max(1, len(beside[name])))
    return rows, paths


def positions(row: list[str]) -> dict[str, float]:
    """Middle of each name of a row, with the row's middle at 0; a point takes less room than a box."""
    widths = [GAP if ">" in name else BOX + GAP for name in row]
    left, found = -sum(widths) / 2, {}
    for name, width in zip(row, widths, strict=True):
        found[name] = left + width / 2
        left += width
    return found


def picture() -> str:
    """The picture as inline SVG, in the colors of the page."""
    graph = reduced(import_graph())
    rows, paths = rows_and_paths(graph)
    x = {name: middle for row in rows for name, middle in positions(row).items()}
    half = max(abs(middle) for middle in x.values()) + BOX / 2 + MARGIN
    height = ROW * len(rows) + HEIGHT + 2 * MARGIN
    y = {name: MARGIN + ROW * (len(rows) - 1 - place) for place, row in enumerate(rows) for name in row}
    parts = [_curve([(half + x[name], y[name]) for name in path]) for path in paths]
    for name in sorted(graph):
        kind = "core" if name == "schedule" else "torch" if name in TORCH else "plain"
        parts.append(_box(half + x[name] - BOX / 2, y[name], BOX, name, kind))
    parts.append(_box(MARGIN, height - HEIGHT - MARGIN, 2 * half - 2 * MARGIN, " · ".join(BASE), "base"))
    title = "Packages of pipeloom: each imports only packages below it"
    return (
        f'<svg class="architecture" viewBox="0 0 {2 * half:g} {height:g}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )


def _box(left: float, top: float, width: float, text: str, kind: str) -> str:
    return (
        f'<g class="{kind}"><rect x="{left:g}" y="{top:g}" width="{width:g}" height="{HEIGHT:g}" rx="5"/>'
        f'<text x="{left + width / 2:g}" y="{top + HEIGHT / 2 + 4:g}" text-anchor="middle">{escape(text)}</text></g>'
    )


def _curve(points: list[tuple[float, float]]) -> str:
    """A line from the lower border of the first box to the upper border of the last one, through the points between."""
    (x, y), *rest = points
    path = f"M{x:g} {y + HEIGHT:g}"
    y += HEIGHT
    for place, (to_x, to_y) in enumerate(rest, start=1):
        bend = (to_y - y) / 2
        path += f" C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}"
        x, y = to_x, to_y
        if place < len(rest):  # straight through the row
            y += HEIGHT
            path += f" V{y:g}"
    return f'<path d="{path}"/>'
