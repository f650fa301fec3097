"""The commands that README, docs, examples and help pages show: found, parsed by the real parser, executed if cheap.

``python tests/support/documented.py`` executes all that need neither root nor a second host, and prints what was done
with each and why (``make docs-commands``). ``tests/from_outside/test_documented_commands.py`` executes the quick ones.
"""

import argparse
import atexit
import importlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
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
from plugins import write_plugin

from pipeloom.cli import COMMANDS, main
from pipeloom.cli.flags import read_words
from pipeloom.cli.reference import command_of

ROOT = Path(__file__).parents[2]
PROGRAMS = ("pipeloom", "make", "torchrun", "python", "python3", "pip")
SLOW = ("train", "verify", "export", "profile", "tradeoff")
"""Commands that start processes, need what such a command leaves, or take long; the quick test only parses them."""


@dataclass(frozen=True)
class Shown:
    """A command on a page.

    Attributes:
        page: path below the root.
        line: of the page.
        words: of the command, without comments.
        is_inline: whether it stands within a sentence, where it may be a part of a command.
        fails: whether it shows what fails: ``|| true`` stands behind it.
    """

    page: str
    line: int
    words: tuple[str, ...]
    is_inline: bool = False
    fails: bool = False

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class Done:
    """What was done with a command.

    Attributes:
        shown: the command.
        what: ``executed``, ``parsed`` or ``wrong``.
        why: it was not executed, or what was wrong.
        cpu_s: CPU seconds.
    """

    shown: Shown
    what: str
    why: str = ""
    cpu_s: float = 0.0


def shown_commands(root: Path = ROOT) -> dict[str, list[Shown]]:
    """Commands by page: of all pages of documentation, of the comments of examples, and of the help of each command."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    found = {}
    for page in [page for page in pages if "_" not in (part[0] for part in page.relative_to(root).parts)]:
        name = str(page.relative_to(root))
        found[name] = list(_of_markdown(name, page.read_text(encoding="utf-8")))
    for file in sorted((root / "examples").glob("*.toml")):
        name = str(file.relative_to(root))
        comments = "\n".join(re.findall(r"^# ?(.*)", file.read_text(encoding="utf-8"), flags=re.MULTILINE))
        found[name] = [Shown(name, 1, words) for words in map(_words, re.findall(r"`([^`]+)`", comments)) if words]
    for name in COMMANDS:
        page = f"pipeloom {name} --help"
        lines = enumerate(command_of(name).examples, start=1)
        found[page] = [Shown(page, number, tuple(shlex.split(line))) for number, line in lines]
    return {name: commands for name, commands in found.items() if commands}


_LANGUAGE = re.compile(r"^({code-block} )?(sh|console|text)?( |$)")


def _of_markdown(page: str, text: str, first_line: int = 1) -> Iterator[Shown]:
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        line = first_line + (token.map or [0])[0]
        if token.type == "fence" and re.match(r"\{(?!code-block)", token.info):
            yield from _of_markdown(page, token.content, line + 1)  # a directive, whose content is Markdown
        elif token.type == "code_block" or (token.type == "fence" and _LANGUAGE.search(token.info)):
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
            yield Shown(page, line + number, words, fails="|| true" in whole)


def _words(text: str) -> tuple[str, ...]:
    """Words of a line that is a command, without its comment and what a shell does for it; none of another line."""
    text = text.replace("COMMAND", "schedule").replace("FAMILY", "1f1b")  # any will do
    command = re.sub(r"^(\w+=\S+ +)*(\.venv/bin/)?| +(\|\||\||>|&&) .*", "", text)
    first = command.split()[:2]
    # "pipeloom train: ..." begins a message
    if not first or first[0] not in PROGRAMS or len(first) < 2 or first[1][-1] in ":,;":
        return ()
    return tuple(shlex.split(command, comments=True))


class _Parsed(BaseException):
    """Ends a command when its command line is read."""


@contextmanager
def _ends_when_parsed(command: str) -> Iterator[None]:
    """Within this, a command ends when it has read and judged its words."""
    module = importlib.import_module(f"pipeloom.cli.{command}")
    readers = {name: value for name, value in vars(module).items() if name.startswith("parse_") or name == "read_flags"}
    assert readers, f"pipeloom {command} reads its words in another way than the others: extend documented.py"

    def ending(name, read):
        def read_and_end(*arguments, **options):
            found = read(*arguments, **options)
            # The others raise what is wrong with the words; this one returns it, and the command raises it.
            if name == "read_flags" and found[1]:
                return found
            raise _Parsed

        return read_and_end

    for name, value in readers.items():
        setattr(module, name, ending(name, value))
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
    """Read a command of a sentence, which may lack what it needs; returns which command or flag there is not."""
    if words[0] not in COMMANDS:
        return f"there is no command {words[0]}"
    rest = [word for word in words[1:] if word not in ("...", "--help", "--help-all")]
    problems = read_words(command_of(words[0]), rest).problems
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
    "plan": {"families": "1f1b", "recompute": "full", "shards": "none", "strategies": "none", "explain": ""},
    "tradeoff": {"batch-per-device": "1", "devices": "64", "methods": "1f1b"},
    "slices": {"unit": "128"},
    "survive": {"budget-s": "1"},
    "generate": {"data.seq-len": "256"},
    "profile": {"budget-s": "4"},
}


def quick(words: tuple[str, ...], number: int) -> tuple[str, ...]:
    """The command with settings that make it quick."""
    flags = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    sets = {flag.replace(".no-", ".").removeprefix("no-") for flag in flags}
    if flags & {"help", "help-all"}:
        return words
    extra = {name: value for name, value in QUICK.get(words[0], {}).items() if name not in sets}
    if words[1:] and words[1].endswith(".toml"):  # a file has its own model, and the reader's have their text
        kept = ("training.", "data.path") if words[1].startswith("examples/") else ("training.",)
        extra = {name: value for name, value in extra.items() if name.startswith(kept) or "." not in name}
    if flags & {"model.file", "model.preset"}:  # which have the sizes of the model
        extra = {name: value for name, value in extra.items() if not name.startswith("model.")}
    if words[0] in ("train", "verify") and not ({"model.tokenizer", "data.tokenizer"} & flags and "bpe" in words):
        extra.pop("data.bpe-vocab-size", None)
    if words[0] == "train" and "output.folder" not in flags:
        extra["output.folder"] = f"outputs/{number}"
    if "search-orders" in flags:  # is a strategy
        extra.pop("strategies", None)
    if "checkpoint.every" in flags:
        extra["training.steps"] = words[words.index("--checkpoint.every") + 1]
    if "optimizer.lr-wsd-decay-steps" in flags and "training.steps" in extra:
        extra["training.steps"] = "60"  # warm-up and decay need as many
    if "checkpoint.resume" in flags and "training.steps" in extra:
        extra["training.steps"] = "102"  # what is resumed has 100
    written = [(f"--{name}", value) if value else (f"--no-{name}",) for name, value in extra.items()]
    return (*words, *(word for flag in written for word in flag))


TEXT = "".join(f"The quick brown fox number {n} jumps over the lazy dog.\n" for n in range(800))
MODEL = {
    "name": "small",
    "tied": False,
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 256,
    "family": "llama",
    "vocab": 257,
}
RECIPE = {"training": {"steps": 20}, "optimizer": {"lr": 1e-3, "lr_warmup_steps": 2}}
HUGGING_FACE = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 14, "num_attention_heads": 2,
                "intermediate_size": 96, "vocab_size": 257, "rms_norm_eps": 1e-5}  # fmt: skip

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "</s>"},
}


def _write_readers_files(folder: Path, text: str, *, executes_all: bool, is_help: bool) -> None:
    """Write what pages take for granted: files of the reader, by the names that the pages use."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    catalog = ROOT / "src" / "pipeloom" / "catalog"
    small = {"num_layers": 14} | {name.replace("-", "_"): int(value) for name, value in _section("model").items()}
    run = {
        "model": small,
        "data": {"path": "text.txt", "seq_len": 16, "tokenizer": "bytes"},
        "layout": {"pp": 2, "loops": 2},
    } | RECIPE
    if "--model.preset" in text or "--model.file" in text:
        run |= {"model": {}, "layout": {"pp": 8, "loops": 1, "recompute": "full"}, "machine": {"cluster": "dgx-h100"}}
        run["schedule"] = {"family": "1f1b"}
    if is_help:  # one file for the examples of all commands: several nodes, stages for --pp 4 and 8, lengths of 128
        run["data"]["seq_len"] = 512
        run["layout"] = {"pp": 8, "dp": 8, "loops": 1, "num_microbatches": 8}
        run |= {"machine": {"cluster": "dgx-h100"}, "schedule": {"family": "1f1b"}}
    files = {
        "text.txt": TEXT,
        "lines.txt": "To be\nOr not to be\n",
        "texts/one.txt": TEXT,
        "my_texts/one.txt": TEXT,
        "notes.txt": TEXT,
        "web/one.txt": TEXT,
        "web.jsonl": "\n".join(json.dumps({"text": line}) for line in TEXT.splitlines()),
        "run.toml": tomli_w.dumps(run),
        "RUN.toml": tomli_w.dumps(run),
        "failures.csv": "hours,node,state\n100,0,down\n105,0,up\n",
        "measured.csv": (ROOT / "examples" / "measured.csv").read_text(),
        "TABLE.csv": (ROOT / "examples" / "measured.csv").read_text(),
        "llama.toml": tomli_w.dumps(MODEL),
        "small.toml": tomli_w.dumps(MODEL),
        "mine.toml": (catalog / "clusters" / "dgx-a100.toml").read_text(),
        "cluster.toml": (catalog / "clusters" / "laptop.toml").read_text(),
        "my.txt": "max_stage_inputs = 2 2\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n",
        "their.csv": "0F0,0F1,,,,0B0,0B1\n,1F0,1F1,1B0,1B1,,\n",
        "config.json": json.dumps(HUGGING_FACE),
        "DIR/config.json": json.dumps(HUGGING_FACE),
        "llama/tokenizer.json": json.dumps(TOKENIZER | {"pre_tokenizer": {"type": "Whitespace"}}),
        "llama/tokenizer_config.json": json.dumps({"eos_token": "</s>"}),
        "program.toml": (catalog / "software" / "megatron-2021.toml").read_text(),
    }
    if not executes_all:  # the folder that the quickstart exports
        files |= {"base/config.json": files["DIR/config.json"], "base/tokenizer.json": json.dumps(TOKENIZER)}
        files["base/tokenizer_config.json"] = json.dumps({"eos_token": "</s>"})
    if "generate DIR" in text:
        files |= {"DIR/tokenizer.json": json.dumps(TOKENIZER), "DIR/tokenizer_config.json": '{"eos_token": "</s>"}'}
    for name, content in files.items():
        if name == "text.txt" or name.partition("/")[0] in text:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content, encoding="utf-8")
    if (executes_all and "DIR" in text) or "generate DIR" in text or "checkpoint.init DIR" in text:
        _write_weights(folder / "DIR")
    for name in ("RUN", "first-run", "tuned", "outputs/demo"):
        # where every command is executed, one of the page may make it
        is_made = executes_all and re.search(rf"(?<!resume {name}) --output.folder {name}\b", text)
        if re.search(rf"\b{name}\b(?!\.)", text) and not is_made:
            shutil.copytree(_trained(), folder / name)


def _write_weights(folder: Path) -> None:
    """Write random weights of the model of ``HUGGING_FACE``."""
    import torch
    from safetensors.torch import save_file

    from pipeloom.catalog import read_model
    from pipeloom.catalog.architectures import ARCHITECTURES
    from pipeloom.config import ModelConfig
    from pipeloom.model import Transformer

    model = read_model(str(folder)).over(ModelConfig()).resolve(257)
    shapes = {name: tuple(one.shape) for name, one in Transformer(model, 16).named_parameters()}
    tensors = ARCHITECTURES["llama"].weights.of_model(list(shapes), model.num_layers)
    save_file({one.name: 0.02 * torch.randn(one.shape(shapes)) for one in tensors}, folder / "model.safetensors")


@cache
def _trained() -> Path:
    """The folder of a run of 100 steps, which pages call RUN; made once."""
    folder = Path(tempfile.mkdtemp(prefix="pipeloom-docs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    words = "--model.num-layers 2 --layout.pp 1 --layout.loops 2 --layout.num-microbatches 2 --output.folder RUN"
    words += " --training.steps 100 --training.no-predict --checkpoint.every 100"
    done, _ = run_command(*quick(("train", *words.split()), 0), folder=folder, imported=TRAINS)
    assert done.returncode == 0, done.stderr
    return folder / "RUN"


def _section(name: str) -> dict[str, str]:
    return {key.partition(".")[2]: value for key, value in SMALL.items() if key.startswith(f"{name}.")}


LEFT_OUT = {
    r"^pipeloom playground": "serves a page until Ctrl-C",
    r"^make ": "a target of make, which takes minutes or changes this environment",
    r"^pip ": "tests/from_outside/test_distribution.py installs",
    r"^pipeloom train planned/": "needs the GPUs of its plan",
    r"^torchrun .*--nnodes": "needs several hosts",
    r"^python ": "a script that takes minutes",
    r"^pipeloom convert merge": "needs runs of a base: tests/training/conversions/test_merge.py",
    r"^pipeloom convert densify": "needs a run of kept blocks: tests/training/conversions/test_density.py",
    r"^pipeloom convert delink": "needs shared layers: tests/training/test_share_layers.py",
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
    is_help = commands[0].page.endswith(" --help")
    _write_readers_files(folder, " ".join(map(str, commands)), executes_all=executes_all, is_help=is_help)
    plugins = _install_plugins(commands[0].page, folder / "plugins")
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
            yield _judged(shown, parse(words, folder), why)
        elif words[0] in SLOW and not executes_all and "--help" not in words:
            problem = parse_part(words) if plugins else parse(words, folder)
            yield _judged(shown, problem, "starts processes, or takes long: make docs-commands")
        else:
            status, printed, cpu_s = _execute(quick(words, number), folder, plugins)
            is_wrong = bool(status) != shown.fails
            yield Done(shown, "wrong" if is_wrong else "executed", f"status {status}: {printed}" * is_wrong, cpu_s)


def _execute(words: tuple[str, ...], folder: Path, plugins: Path | None) -> tuple[int, str, float]:
    """Run a command in a folder; returns its status, what it printed on stderr, and its CPU seconds."""
    if plugins is not None:
        path = os.pathsep.join([str(plugins), *sys.path])
        done, _ = run_command(*words, folder=folder, timeout_s=120, PYTHONPATH=path)
    elif words[0] in SLOW and "--help" not in words:
        done, _ = run_command(*words, folder=folder, timeout_s=300, imported=TRAINS)
    else:
        begin, printed = time.process_time(), StringIO()
        with chdir(folder), redirect_stdout(printed), redirect_stderr(printed):
            try:
                status = main(words)
            except SystemExit as end:  # of --help
                status = int(end.code or 0)
        return status, printed.getvalue(), time.process_time() - begin
    return done.returncode, done.stdout + done.stderr, done.cpu_s


def _install_plugins(page: str, folder: Path) -> Path | None:
    """Write the distributions that a page shows, Python and entry point; ``None`` if it shows none."""
    if not page.endswith(".md"):
        return None
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```(?:(?!```).)*```toml\n(\[project.entry.*?)```", text, flags=re.DOTALL)
    for code, project in shown:
        ((group, points),) = tomllib.loads(project)["project"]["entry-points"].items()
        ((name, module),) = points.items()
        write_plugin(folder, module, code, {group: name})
    return folder if shown else None


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
    targets, knobs = (
        set(re.findall(r"^([a-z][a-z-]*):", makefile, re.M)),
        set(re.findall(r"^([A-Z_]+) *\?=", makefile, re.M)),
    )
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


def _main() -> int:
    """Execute commands and print what was done with each; returns the exit status."""
    parser = argparse.ArgumentParser(description="Execute the commands that README, docs and examples show.")
    parser.add_argument("pages", nargs="*", help="only these pages, such as docs/plan.md")
    parser.add_argument("--quick", action="store_true", help="only parse those that start processes")
    options = parser.parse_args()
    done: list[Done] = []
    for page, commands in shown_commands().items():
        if not options.pages or page in options.pages:
            with tempfile.TemporaryDirectory(prefix="pipeloom-docs-") as folder:
                for one in check_page(commands, Path(folder), executes_all=not options.quick):
                    done.append(one)
                    sys.stderr.write(f"{one.what:<9} {one.cpu_s:5.1f} s  {page}:{one.shown.line}  {one.shown}\n")
    sys.stdout.write(table(done) + "\n")
    return int(any(one.what == "wrong" for one in done))


if __name__ == "__main__":
    sys.exit(_main())
