"""The wheel and the source archive, tried as somebody does who has nothing but them.

``python tests/support/distribution.py DIST`` tests what ``python -m build`` wrote to a folder (``make dist``);
``--install`` takes the dependencies from pip's index into an environment that sees no other, instead of those here.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
SMALL = "--model.num-layers 2 --model.hidden-size 32 --model.num-heads 2 --data.seq-len 16 --data.path text.txt"
COMMANDS = {
    "--version": "pipeloom 0",
    "schedule breadth-first --pp 4 --loops 4 --num-microbatches 8": "# makespan           105",
    f"simulate {SMALL.rpartition(' --')[0]} --layout.pp 2 --layout.loops 1": "step time",
    "plan --model llama-3-8b --cluster dgx-h100 --devices 64 --global-batch 256 --seq 8192 --families 1f1b --no-explain"
    " --recompute full --shards none --strategies none": "tokens/s",
    f"train {SMALL} --layout.pp 2 --layout.loops 1 --layout.num-microbatches 2 --training.steps 2 --output.folder run"
    " --training.sample-tokens 8 --training.validation-batches 1": "report.html",
    "report run": "report.html",
    f"launch {SMALL} --layout.pp 2 --layout.loops 1 --out start --to torchrun slurm": "torchrun.sh",
}
"""Commands of the wheel -> a part of what they print."""


def build_wheel(sources: Path, folder: Path) -> Path:
    """Build a wheel without a network; the sources are copied first, so that no earlier build is part of it."""
    copy = folder / "sources"
    copy.mkdir(parents=True)
    for name in SOURCES:
        if (sources / name).is_dir():
            shutil.copytree(sources / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(sources / name, copy)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    run([sys.executable, "-W", "ignore", "-c", code], copy, folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run(
    words: list[str], cwd: Path, home: Path, text: str | None = None, timeout_s: float = 120.0, **variables: str
) -> str:
    """Run a command that sees no package and no cache of the caller; returns what it printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name != "COLUMNS"}
    env |= {"XDG_CACHE_HOME": str(home / ".cache"), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", **variables}
    done = subprocess.run(
        words, cwd=cwd, env=env, input=text, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def content(wheel: Path) -> dict[str, int]:
    """Files of a wheel with their checksums, but for the list of them."""
    with ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist() if not entry.filename.endswith("/RECORD")}


def content_problems(wheel: Path) -> list[str]:
    """What a wheel lacks of the package, and what else it has."""
    package = ROOT / "src" / "pipeloom"
    wanted = {
        f"pipeloom/{file.relative_to(package).as_posix()}"
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    found = {name for name in content(wheel) if ".dist-info/" not in name}
    return [f"lacks {name}" for name in sorted(wanted - found)] + [f"has {name}" for name in sorted(found - wanted)]


def install(wheel: Path, folder: Path, *, with_dependencies: bool = False) -> Path:
    """Install a wheel into an environment of its own; returns the folder of the environment's commands.

    Args:
        wheel: to install.
        folder: of the environment.
        with_dependencies: take them from pip's index; else those of this interpreter are put behind the wheel.
    """
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent, folder.parent)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-q"]
    if with_dependencies:
        run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], folder.parent, folder.parent, timeout_s=1200)
        return python.parent
    run([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel)], folder.parent, folder.parent)
    # behind: the package of the checkout may be installed there
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join({sysconfig.get_path(name) for name in ("purelib", "platlib")}))
    return python.parent


def try_commands(commands: Path, folder: Path, **variables: str) -> None:
    """Run the README's lines of Python and the commands of an environment in an empty folder, and open the report."""
    folder.mkdir()
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 300, encoding="utf-8")
    found = run([str(commands / "python"), "-c", "import pipeloom; print(pipeloom.__file__)"], folder, folder.parent)
    assert Path(found.strip()).is_relative_to(commands.parent), f"the package is that of {found}"
    run(
        [str(commands / "python"), "-W", "error::SyntaxWarning", "-"],
        folder,
        folder.parent,
        text=readme_lines(),
        **variables,
    )
    for words, part in COMMANDS.items():
        printed = run([str(commands / "pipeloom"), *words.split()], folder, folder.parent, **variables)
        assert part in printed, f"pipeloom {words} printed\n{printed}"
    page = _Page()
    page.feed((folder / "run" / "report.html").read_text(encoding="utf-8"))
    assert page.data, "the report has no contents"
    assert not page.loaded, f"the report loads {page.loaded}"


def readme_lines() -> str:
    """The lines of Python that the README shows."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found, "the README has no block of Python"
    return found[1]


class _Page(HTMLParser):
    """The report: its data, and what it loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, object] = {}
        self.loaded: list[str] = []
        self._is_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self._is_data = named.get("type") == "application/json"
        self.loaded += [link for name in ("src", "href") if (link := named.get(name) or "").startswith(("http", "//"))]

    def handle_data(self, data: str) -> None:
        if self._is_data and data.strip():
            self.data |= json.loads(data)


def _test(folder: Path, *, with_dependencies: bool) -> None:
    """Test the wheel and the source archive in a folder."""
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    assert (problems := content_problems(wheel)) == [], "\n".join(problems)
    with tempfile.TemporaryDirectory(prefix="pipeloom-dist-") as name:
        home = Path(name)
        try_commands(install(wheel, home / "environment", with_dependencies=with_dependencies), home / "empty")
        with tarfile.open(archive) as packed:
            # Python before 3.11.4 has no filters; the archive was built here.
            packed.extractall(home / "archive", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        (unpacked,) = (home / "archive").iterdir()
        assert content(build_wheel(unpacked, home / "built")) == content(wheel), "the archive builds another wheel"
        tests = [
            "tests/schedule/test_text.py",
            "tests/test_schedule_pages.py",
            "tests/test_readme.py",
            "tests/test_site.py",
        ]
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": str(unpacked / "src")}
        subprocess.run(words, cwd=unpacked, env=env, check=True, timeout=900)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Test a wheel and a source archive.")
    parser.add_argument("dist", type=Path, help="their folder")
    parser.add_argument("--install", action="store_true", help="take dependencies from pip's index")
    options = parser.parse_args()
    _test(options.dist.resolve(), with_dependencies=options.install)
    sys.stdout.write(f"tested: {', '.join(sorted(file.name for file in options.dist.iterdir()))}\n")
