"""The commands that README, docs and examples show: found, parsed by the real command line, executed where that is cheap.

``python tests/support/documented.py`` executes all that need neither root nor a second host, and prints what was done with
each and why (``make docs-commands``). ``tests/from_outside/test_documented_commands.py`` executes the quick ones.
"""

import argparse
import atexit
import importlib
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

import tomli_w
from commands import TRAINS, run_command
from markdown_it import MarkdownIt
from markdown_it.token import Token

from pipeloom.cli import COMMANDS, main
from pipeloom.cli.flags import flag_problems
from pipeloom.config import RunConfig

ROOT = Path(__file__).parents[2]
PROGRAMS = ("pipeloom", "make", "torchrun", "python", "python3", "pip")
SLOW = ("train", "verify", "export", "profile")
"""Commands that start processes, or need what such a command leaves; the quick test only parses them."""


@dataclass(frozen=True)
class Shown:
    """A command on a page.

    Attributes:
        page: path below the root.
        line: of the page.
        words: of the command, without comments.
        is_inline: whether it stands within a sentence, where it may be a part of a command.
    """

    page: str
    line: int
    words: tuple[str, ...]
    is_inline: bool = False

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class Done:
    """What was done with a command: ``executed``, ``parsed`` or ``wrong``; why not executed, or what was wrong; CPU seconds."""

    shown: Shown
    what: str
    why: str = ""
    cpu_s: float = 0.0


def shown_commands(root: Path = ROOT) -> dict[str, list[Shown]]:
    """Commands by page: of all pages of documentation, and of the comments of examples."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    found = {}
    for page in [page for page in pages if "_" not in (part[0] for part in page.relative_to(root).parts)]:
        name = str(page.relative_to(root))
        found[name] = list(_of_markdown(name, page.read_text(encoding="utf-8")))
    for file in sorted((root / "examples").glob("*.toml")):
        name = str(file.relative_to(root))
        comments = "\n".join(re.findall(r"^# ?(.*)", file.read_text(encoding="utf-8"), flags=re.MULTILINE))
        found[name] = [Shown(name, 1, words) for words in map(_words, re.findall(r"`([^`]+)`", comments)) if words]
    return {name: commands for name, commands in found.items() if commands}


def _of_markdown(page: str, text: str, first_line: int = 1) -> Iterator[Shown]:
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        line = first_line + (token.map or [0])[0]
        if token.type == "fence" and token.info.startswith("{"):
            yield from _of_markdown(page, token.content, line + 1)  # a directive, whose content is Markdown
        elif token.type in ("fence", "code_block") and token.info.strip() in ("", "sh", "bash", "console", "shell", "text"):
            yield from _of_block(page, token, line + (token.type == "fence"))
        for child in token.children or []:
            words = _words(child.content) if child.type == "code_inline" else ()
            if any(word.startswith("--") for word in words) or words[:1] == ("make",):
                yield Shown(page, line, words, is_inline=True)


def _of_block(page: str, token: Token, line: int) -> Iterator[Shown]:
    begun = ""
    for number, text in enumerate(token.content.split("\n")):
        if token.info.strip() == "console" and not begun and not text.startswith("$ "):
            continue  # what a command printed
        whole = begun + text.removeprefix("$ ")
        begun = whole[:-1] if whole.endswith("\\") else ""
        if not begun and (words := _words(whole)):
            yield Shown(page, line + number, words)


def _words(text: str) -> tuple[str, ...]:
    """Words of a line that is a command, without its comment; none of another line."""
    first = text.split()[:2]
    if not first or first[0].removeprefix(".venv/bin/") not in PROGRAMS or (len(first) > 1 and first[1].endswith(":")):
        return ()
    words = shlex.split(text.replace(".venv/bin/", "", 1), comments=True)
    return tuple(words) if len(words) > 1 and re.fullmatch(r"[\w./~'-][^,;]*|\.\.\.", words[1]) else ()


class _Parsed(BaseException):
    """Ends a command when its command line is read."""


@contextmanager
def _ends_when_parsed(command: str) -> Iterator[None]:
    """Within this, a command ends when it has read and judged its words."""
    module = importlib.import_module(f"pipeloom.cli.{command}")
    readers = {name: value for name, value in vars(module).items() if name.startswith("parse_")}
    assert readers, f"pipeloom {command} reads its words in another way than the others: extend documented.py"

    def ending(read):
        def read_and_end(*arguments, **options):
            read(*arguments, **options)
            raise _Parsed

        return read_and_end

    for name, value in readers.items():
        setattr(module, name, ending(value))
    try:
        yield
    finally:
        for name, value in readers.items():
            setattr(module, name, value)


def parse(words: tuple[str, ...], folder: Path) -> str:
    """Read the words behind ``pipeloom`` as the command does; what is wrong, or an empty text."""
    if words[0] not in COMMANDS:
        return f"there is no command {words[0]}"
    printed = StringIO()
    with chdir(folder), redirect_stdout(printed), redirect_stderr(printed), _ends_when_parsed(words[0]):
        try:
            status = main(words)
        except _Parsed:
            return ""
        except SystemExit as end:
            status = end.code
    return "" if status == 0 else printed.getvalue()


def parse_part(words: tuple[str, ...]) -> str:
    """Read a command of a sentence, which may lack what it needs: the command and its flags are there, or what is not."""
    if words[0] not in COMMANDS:
        return f"there is no command {words[0]}"
    options = getattr(importlib.import_module(f"pipeloom.cli.{words[0]}"), "Options", RunConfig)
    problems = flag_problems(options, [word for word in words[1:] if word not in ("...", "--help", "--help-all")])
    return "; ".join(problem for problem in problems if problem.startswith("there is no flag"))


SMALL = {
    "model.hidden-size": "32",
    "model.num-heads": "2",
    "data.path": "text.txt",
    "data.seq-len": "16",
    "data.bpe-vocab-size": "300",
}
"""Settings that make a run quick; those that a command sets itself stay."""
QUICK = {
    "train": SMALL | {"training.steps": "2", "training.validation-batches": "1", "training.sample-tokens": "4"},
    "verify": SMALL,
    "export": {},
    "profile": {"budget-s": "4"},
    "plan": {"budget-s": "5"},
}


def quick(words: tuple[str, ...], number: int) -> tuple[str, ...]:
    """The command with settings that make it quick."""
    flags = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    if flags & {"help", "help-all"}:
        return words
    extra = {name: value for name, value in QUICK.get(words[0], {}).items() if name not in flags}
    if words[0] in ("train", "verify") and not ({"model.tokenizer", "data.tokenizer"} & flags and "bpe" in words):
        extra.pop("data.bpe-vocab-size")
    if words[0] == "train" and "output.folder" not in flags:
        extra["output.folder"] = f"outputs/{number}"
    return (*words, *(word for name, value in extra.items() for word in (f"--{name}", value)))


TEXT = "".join(f"The quick brown fox number {n} jumps over the lazy dog.\n" for n in range(800))
MODEL = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "mlp": "swiglu", "vocab": 257}
RECIPE = {"training": {"steps": 2}}


def _write_readers_files(folder: Path, text: str) -> None:
    """Write what pages take for granted: files of the reader, by the names that the pages use."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    catalog = ROOT / "src" / "pipeloom" / "catalog"
    small = {"num_layers": 14} | {name.replace("-", "_"): int(value) for name, value in _section("model").items()}
    run = {"model": small, "data": {"path": "text.txt", "seq_len": 16}, **RECIPE, "layout": {"pp": 2, "loops": 2}}
    files = {
        "text.txt": TEXT,
        "texts/one.txt": TEXT,
        "my_texts/one.txt": TEXT,
        "run.toml": tomli_w.dumps(run),
        "RUN.toml": tomli_w.dumps(run),
        "TABLE.csv": (ROOT / "examples" / "measured.csv").read_text(),
        "llama.toml": tomli_w.dumps(MODEL),
        "small.toml": tomli_w.dumps(MODEL),
        "mine.toml": (catalog / "clusters" / "dgx-a100.toml").read_text(),
        "cluster.toml": (catalog / "clusters" / "laptop.toml").read_text(),
        "program.toml": (catalog / "software" / "megatron-2021.toml").read_text(),
    }
    for name, content in files.items():
        if name == "text.txt" or name.partition("/")[0] in text:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content, encoding="utf-8")
    if re.search(r"\bRUN\b(?!\.)", text):
        shutil.copytree(_trained(), folder / "RUN")


@cache
def _trained() -> Path:
    """The folder of a run, which pages call RUN; made once."""
    folder = Path(tempfile.mkdtemp(prefix="pipeloom-docs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    words = ["--layout.pp", "1", "--layout.loops", "2", "--layout.num-microbatches", "2", "--checkpoint.every", "50"]
    words += ["--training.steps", "100", "--training.no-predict", "--output.folder", "RUN"]
    done, _ = run_command(*quick(("train", *words), 0), folder=folder, imported=TRAINS)
    assert done.returncode == 0, done.stderr
    return folder / "RUN"


def _section(name: str) -> dict[str, str]:
    return {key.partition(".")[2]: value for key, value in SMALL.items() if key.startswith(f"{name}.")}


LEFT_OUT = {
    r"^make (bench-network|test|check|format|clean|demo|.*)": "a target of make, which has its own test or takes minutes",
    r"^pip ": "tests/from_outside/test_distribution.py installs",
    r"^torchrun .*--nnodes": "needs several hosts",
    r"^python ": "a script that takes minutes",
    r"TABLE\.csv .*--(sets|models)|--stage-times": "needs a table that is no part of the checkout",
}
"""What is never executed -> why."""


def check_page(commands: list[Shown], folder: Path, *, executes_all: bool) -> Iterator[Done]:
    """Parse or execute each command of a page, in its order, in one folder.

    Args:
        commands: of the page.
        folder: empty, where they run.
        executes_all: also those that start processes.
    """
    _write_readers_files(folder, " ".join(map(str, commands)))
    for number, shown in enumerate(commands):
        program, *words = shown.words
        if shown.is_inline:
            yield _judged(shown, _part_problem(shown.words), "part of a sentence")
            continue
        why = next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, str(shown))), "")
        if program != "pipeloom":
            yield _judged(shown, _other_problem(shown.words, folder), why or "a launcher's command")
            continue
        words = _completed(tuple(words), commands[:number])
        if why:
            yield _judged(shown, parse_part(words), why)
        elif words[0] in SLOW and not executes_all and "--help" not in words:
            yield _judged(shown, parse(words, folder), "starts processes: make docs-commands")
        else:
            # what its own lines trained and tests of commands in one process share is imported once
            done, _ = run_command(*quick(words, number), folder=folder, timeout_s=120, imported=TRAINS)
            wrong = f"status {done.returncode}: {done.stderr}" if done.returncode else ""
            yield Done(shown, "wrong" if wrong else "executed", wrong, done.cpu_s)


def _judged(shown: Shown, problem: str, why: str) -> Done:
    return Done(shown, "wrong", problem) if problem else Done(shown, "parsed", why)


def _completed(words: tuple[str, ...], earlier: list[Shown]) -> tuple[str, ...]:
    """The words with those of the page's first such command in the place of ``...``."""
    if "..." not in words:
        return words
    same = next((shown.words[2:] for shown in earlier if shown.words[:2] == ("pipeloom", words[0])), ())
    place = words.index("...")
    # those of the line itself stand behind, so that they hold
    return (words[0], *same, *words[1:place], *words[place + 1 :])


def _part_problem(words: tuple[str, ...]) -> str:
    return parse_part(words[1:]) if words[0] == "pipeloom" else _other_problem(words, ROOT)


def _other_problem(words: tuple[str, ...], folder: Path) -> str:
    """What is wrong with a command of another program, or an empty text."""
    return {"make": _make_problem, "pip": _pip_problem, "torchrun": _torchrun_problem}.get(words[0], _python_problem)(
        words[1:], folder
    )


def _make_problem(words: tuple[str, ...], folder: Path) -> str:
    makefile = (ROOT / "Makefile").read_text()
    targets, knobs = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.M)), set(re.findall(r"^([A-Z_]+) *\?=", makefile, re.M))
    names = {word.partition("=")[0] for word in words}
    return ", ".join(f"the Makefile has no {name}" for name in sorted(names - targets - knobs))


def _pip_problem(words: tuple[str, ...], folder: Path) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {extra for word in words for extra in re.findall(r"\[([\w,]+)\]", word)}
    unknown = {name for group in extras for name in group.split(",")} - set(project["optional-dependencies"])
    return ", ".join(f"pyproject.toml has no extra {name}" for name in sorted(unknown))


def _torchrun_problem(words: tuple[str, ...], folder: Path) -> str:
    from torch.distributed.run import get_args_parser

    try:
        with redirect_stderr(StringIO()) as printed:
            given = get_args_parser().parse_args([word for word in words if word != "..."])
    except SystemExit:
        return printed.getvalue()
    if not given.module or given.training_script != "pipeloom":
        return "torchrun starts something else than -m pipeloom"
    return parse(tuple(given.training_script_args), folder)


def _python_problem(words: tuple[str, ...], folder: Path) -> str:
    """A script exists, and its text has the flags."""
    if words[0] == "-m":
        script = ROOT / "benchmarks" / Path(*words[1].split(".")).with_suffix(".py")
        if words[1] in ("pytest", "pip", "venv", "build"):
            return ""
    else:
        script = ROOT / words[0]
    if not script.is_file():
        return f"there is no {script.relative_to(ROOT)}"
    flags = [word for word in words if word.startswith("--")]
    return ", ".join(f"{script.name} has no {flag}" for flag in flags if f'"{flag}"' not in script.read_text())


def table(done: list[Done]) -> str:
    """What was done with each command, and the sums."""
    lines = [f"{d.what:<9} {d.shown.page}:{d.shown.line}  {d.shown}{f'  ({d.why})' if d.why else ''}" for d in done]
    sums = Counter(f"{d.what}{f', not executed: {d.why}' if d.what == 'parsed' else ''}" for d in done)
    return "\n".join([*lines, "", f"{len(done)} commands", *(f"{n:5} {what}" for what, n in sums.most_common())])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Execute the commands that README, docs and examples show.")
    parser.add_argument("pages", nargs="*", help="only these pages, such as docs/plan.md")
    parser.add_argument("--quick", action="store_true", help="only parse those that start processes")
    options = parser.parse_args()
    all_done: list[Done] = []
    for _page, _commands in shown_commands().items():
        if not options.pages or _page in options.pages:
            with tempfile.TemporaryDirectory(prefix="pipeloom-docs-") as _folder:
                for _done in check_page(_commands, Path(_folder), executes_all=not options.quick):
                    all_done.append(_done)
                    print(f"{_done.what:<9} {_done.cpu_s:5.1f} s  {_page}:{_done.shown.line}  {_done.shown}", flush=True)
    print(f"\n{table(all_done)}")
    sys.exit(any(d.what == "wrong" for d in all_done))
