"""The site: links, navigation and generated parts, without the generator; and a strict build where there is one."""

import importlib.util
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from pipeloom.catalog.architectures import ARCHITECTURES
from pipeloom.cli import COMMANDS, main
from pipeloom.config import RunConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def generated():
    sys.path.insert(0, str(DOCS / "_site"))
    try:
        yield importlib.import_module("generated")
    finally:
        sys.path.remove(str(DOCS / "_site"))


@cache
def anchors(page, fill):
    """What a link may name on a page: its headings, as GitHub and MyST write them, and marks of its own."""
    text = re.sub(r"^```.*?^```$", "", fill(page.read_text(encoding="utf-8")), flags=re.M | re.S)
    slugs, found = re.findall(r"^#{1,6} +(.+)$", text, flags=re.M), set(re.findall(r"\{#([\w-]+)\}", text))
    for title in slugs:
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        found.add(re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_link_and_anchor_of_a_page_exists(page, generated):
    text = re.sub(r"^```(?!\{).*?^```$", "", generated.filled(page.read_text(encoding="utf-8")), flags=re.M | re.S)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"links to {link}, which does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target, generated.filled), f"links to {link}, which has no such heading"


def test_help_and_documentation_name_the_same_types_of_hugging_face(capsys):
    known = set(ARCHITECTURES)
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    shown = re.search(r"--model\.file PATH(.*?)--model\.family", capsys.readouterr().out, flags=re.S)
    assert shown is not None
    assert known <= set(re.findall(r"\w+", shown[1]))
    (row,) = re.findall(
        r"^\| `model\.file` .*$", (DOCS / "how-to" / "own-model.md").read_text(encoding="utf-8"), flags=re.M
    )
    assert known <= set(re.findall(r"`(\w+)`", row))
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "simulate.md").read_text(encoding="utf-8"), flags=re.M)
    assert known <= set(re.findall(r"`(\w+)`", "".join(rows)))


def test_every_page_is_in_the_navigation():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, flags=re.M | re.S)
    entries = {line for block in blocks for line in block.splitlines() if line and not line.startswith(":")}
    named = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES}
    # The first page of a folder lists the others.
    listed = {name for name in named if f"{name.rpartition('/')[0]}/README" in entries}
    assert named - entries - listed == {"index"}
    assert entries <= named


def test_every_marker_has_a_part_and_every_part_a_page(generated):
    found = [name for page in PAGES for name in generated.MARKER.findall(page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(generated.GENERATED)


def test_the_reference_has_every_setting_with_its_meaning(generated):
    text = generated.run_file()
    for section, options in get_type_hints(RunConfig).items():
        for item in fields(options):
            entry = re.search(rf"^\[`{section}\.{item.name}`\]\{{#\S+\}}\n: (.+)", text, flags=re.M)
            assert entry, f"{section}.{item.name} is missing"
            assert len(entry[1].partition(" *")[0].split()) >= 1, f"{section}.{item.name} has no description"


def test_the_reference_has_every_command(generated):
    assert re.findall(r"^## (.+)$", generated.commands(), flags=re.M) == list(COMMANDS)


def test_the_picture_and_the_list_of_packages_are_complete(generated):
    packages = {path.stem for path in (ROOT / "src" / "pipeloom").iterdir() if not path.name.startswith("_")}
    packages -= {"py"}  # py.typed
    drawn = set(re.findall(r"<text[^>]*>([^<]+)</text>", generated.architecture()))
    assert packages == {name for text in drawn for name in text.split(" · ")}
    listed = re.findall(r"^\| `([a-z]\w*)(?:/|\.py)` \|", (DOCS / "design.md").read_text(encoding="utf-8"), flags=re.M)
    assert packages == set(listed)


def test_the_dashes_of_a_flag_in_a_sentence_stay_two():
    # By default Sphinx makes a dash of them, and a flag of a help text cannot be copied.
    assert re.search(r"^smartquotes = False", (DOCS / "conf.py").read_text(encoding="utf-8"), flags=re.M)


@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="Sphinx is not installed: pip install '.[docs]'")
def test_every_page_is_read_without_a_warning(tmp_path):
    """Writing the pages takes as long again; ``make docs`` does, with a look at what they load (``docs/conf.py``)."""
    words = ["-b", "dummy", "-W", "--keep-going", "-q", "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path)]
    command = [sys.executable, "-m", "sphinx", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="Sphinx is not installed: pip install '.[docs]'")
def test_a_page_that_loads_something_from_a_network_ends_the_build(tmp_path):
    check = runpy.run_path(str(DOCS / "conf.py"))["check_pages"]
    app = SimpleNamespace(
        builder=SimpleNamespace(name="html"), outdir=tmp_path, env=SimpleNamespace(found_docs=["page"])
    )
    (tmp_path / "searchindex.js").write_text('["page"]')
    (tmp_path / "page.html").write_text('<a href="https://there"></a><script src="here.js"></script>')
    check(app, None)
    (tmp_path / "searchindex.js").write_text("[]")
    (tmp_path / "page.html").write_text('<link rel="stylesheet" href="https://there/font.css">')
    with pytest.raises(Exception, match="the search lacks page\npage.html loads something from a network"):
        check(app, None)
