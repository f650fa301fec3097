"""Every command that README, docs, examples and help pages show is one that pipeloom takes; quick ones are executed.

``make docs-commands`` executes those that start processes, too.
"""

import pytest
from documented import Shown, check_page, parse, parse_part, shown_commands
from thinned import thinned

SHOWN = shown_commands()


PAGES = [page for page in SHOWN if not page.endswith(" --help")]


@pytest.mark.parametrize("page", [*thinned(PAGES, 3), *(page for page in SHOWN if page not in PAGES)])
def test_the_commands_of_a_page_work(page, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    (tmp_path / "here").mkdir()
    done = list(check_page(SHOWN[page], tmp_path / "here", executes_all=False))
    assert [f"line {one.shown.line}: {one.shown}: {one.why}" for one in done if one.what == "wrong"] == []
    assert all(one.why for one in done if one.what == "parsed")


def test_most_pages_with_commands_and_every_command_of_the_program_are_found():
    from pipeloom.cli import COMMANDS

    found = {shown.words[1] for page in SHOWN.values() for shown in page if shown.words[0] == "pipeloom"}
    assert set(COMMANDS) <= found
    assert {"README.md", "CONTRIBUTING.md", "docs/plan.md", "docs/quickstart.md", "examples/run.toml"} <= set(SHOWN)
    assert {f"pipeloom {name} --help" for name in COMMANDS} <= set(SHOWN)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("train --layout.ppp 4", "layout.ppp"),
        ("train missing.toml", "missing.toml"),
        ("train --layout.pp 64", "layers"),
        ("schedule 1f1b --microbatch 3", "microbatch"),
        ("trian", "trian"),
    ],
)
def test_a_command_that_pipeloom_refuses_is_found(words, part, tmp_path):
    assert part in parse(tuple(words.split()), tmp_path)


def test_a_command_that_is_parsed_does_not_begin(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 99)
    (tmp_path / "run.toml").write_text('data = { path = "text.txt", tokenizer = "bytes" }')
    assert parse(("train", "run.toml", "--output.folder", "run"), tmp_path) == ""
    assert not (tmp_path / "run").exists()


def test_a_part_of_a_command_is_read_by_its_flags():
    assert parse_part(("plan", "--out", "...")) == ""
    assert "--outt" in parse_part(("plan", "--outt"))


def test_what_make_torchrun_pip_and_scripts_do_not_take_is_found(tmp_path):
    wrong = {
        "make tset": "tset",
        "torchrun --nproc-per-nodes 4 -m pipeloom train": "nproc-per-nodes",
        "torchrun --nproc-per-node 4 -m pipeloom train --layout.ppp 4": "layout.ppp",
        "pip install 'pipeloom[bpf]'": "bpf",
        "python benchmarks/missing.py": "missing.py",
        "python benchmarks/slices.py --roundz 3": "roundz",
    }
    (tmp_path / "here").mkdir()
    shown = [Shown("page.txt", 1, tuple(line.replace("'", "").split())) for line in wrong]
    done = check_page(shown, tmp_path / "here", executes_all=False)
    assert all(one.what == "wrong" and part in one.why for one, part in zip(done, wrong.values(), strict=True))
