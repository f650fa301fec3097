"""Values of other distributions: found by name, and left out with one sentence where they are broken."""

import importlib
import linecache
import sys

import pytest
from plugins import write_plugin

from pipeloom import registry
from pipeloom.cli import main
from pipeloom.errors import UserError
from pipeloom.families import FAMILIES
from pipeloom.registry import Registry

GROUP = "pipeloom.things"
ADDS = "from {module} import THINGS\nTHINGS.add('{name}', {value})\n"


@pytest.fixture
def things(tmp_path, monkeypatch):
    """A registry that modules of the folder find as ``registry_of_things.THINGS``."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_REGISTRIES", [])  # what is broken here is not mentioned in other tests
    linecache.clearcache()
    own = type(sys)("registry_of_things")
    own.THINGS = Registry("thing", GROUP, int)
    own.THINGS.add("own", 0)
    monkeypatch.setitem(sys.modules, "registry_of_things", own)
    importlib.invalidate_caches()
    yield own.THINGS
    for name in ("one_plugin", "other_plugin"):
        sys.modules.pop(name, None)


def adds(name, value=1):
    return ADDS.format(module="registry_of_things", name=name, value=value)


def test_a_value_of_another_distribution_is_found_by_name_and_listed_behind_the_own_ones(things, tmp_path):
    write_plugin(tmp_path, "one_plugin", adds("new"), {GROUP: "new"})
    assert "own" in things
    assert "one_plugin" not in sys.modules  # not before somebody looks for more
    assert things["new"] == 1
    assert list(things) == ["own", "new"]
    assert things.broken == {}


def test_a_module_that_was_imported_before_is_the_same_plug_in(things, tmp_path):
    write_plugin(tmp_path, "one_plugin", adds("new"), {GROUP: "new"})
    importlib.import_module("one_plugin")
    assert dict(things) == {"own": 0, "new": 1}
    assert things.broken == {}


def test_an_unknown_name_has_close_ones(things, tmp_path):
    write_plugin(tmp_path, "one_plugin", adds("wonderful"), {GROUP: "wonderful"})
    with pytest.raises(UserError, match="there is no thing 'wonderfuller'; did you mean 'wonderful'?"):
        things.find("wonderfuller")


@pytest.mark.parametrize(
    ("code", "reason", "line"),
    [
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax", 2),
        ("from pipeloom.registry import Registries\n", "ImportError: cannot import name 'Registries'", 1),
        (adds("new") + "\ny = z\n", "NameError: name 'z' is not defined", 4),
        ("raise SystemExit(3)\n", "SystemExit: 3", 1),
    ],
)
def test_a_module_that_cannot_be_imported_is_left_out_with_its_line(things, tmp_path, code, reason, line):
    file = write_plugin(tmp_path, "one_plugin", code, {GROUP: "new"}, "some-tools")
    write_plugin(tmp_path, "other_plugin", adds("fine"), {GROUP: "fine"})
    assert list(things) == ["own", "fine"]
    assert things.broken["new"].startswith(f"the thing 'new' of some-tools 1.0 is left out: {reason}")
    assert things.broken["new"].endswith(f", in {file}, line {line}: {code.splitlines()[line - 1]}")
    with pytest.raises(UserError, match="the thing 'new' of some-tools 1.0 is left out"):
        things.find("new")


def test_of_two_of_one_name_the_first_stays(things, tmp_path):
    write_plugin(tmp_path, "one_plugin", adds("new", 1), {GROUP: "new"})
    write_plugin(tmp_path, "other_plugin", adds("new", 2), {GROUP: "new"})
    assert things["new"] == 1
    assert things.broken == {
        "new": "the thing 'new' of other_plugin 1.0 is left out: there is a thing 'new' already, of one_plugin 1.0"
    }


def test_a_name_of_the_package_is_taken(things, tmp_path):
    write_plugin(tmp_path, "one_plugin", adds("own", 2), {GROUP: "own"})
    assert dict(things) == {"own": 0}
    assert things.broken == {"own": "the thing 'own' of one_plugin 1.0 is left out: there is a thing 'own' already"}


def test_an_entry_whose_name_is_taken_is_left_out_and_its_module_is_not_imported(things, tmp_path):
    write_plugin(tmp_path, "one_plugin", adds("other"), {GROUP: "own"})
    assert dict(things) == {"own": 0}
    assert list(things.broken) == ["own"]
    assert "one_plugin" not in sys.modules


def test_registration_imports_no_plug_in(things, tmp_path):
    write_plugin(tmp_path, "one_plugin", adds("new"), {GROUP: "new"})
    assert (things.is_taken("own"), things.is_taken("new"), None in things) == (True, False, False)
    things.add("later", 2)
    assert "one_plugin" not in sys.modules
    assert "new" in things


def test_a_value_of_another_type_is_refused(things, tmp_path):
    file = write_plugin(tmp_path, "one_plugin", adds("new", "'text'"), {GROUP: "new"})
    assert list(things) == ["own"]
    reason = "a thing must be of type int, found 'text' for 'new'"
    assert f"is left out: {reason}, in {file}, line 2: THINGS.add('new', 'text')" in things.broken["new"]


def test_a_module_without_the_value_is_named(things, tmp_path):
    write_plugin(tmp_path, "one_plugin", adds("newer"), {GROUP: "new"})
    assert things.find("newer") == 1
    assert things.broken["new"].endswith("one_plugin adds no thing of that name")


def test_a_wrong_entry_of_a_module_leaves_out_no_other_value_of_it(things, tmp_path):
    write_plugin(tmp_path, "one_plugin", adds("late"), {GROUP: "early"})
    (listed,) = tmp_path.glob("*.dist-info/entry_points.txt")
    listed.write_text(listed.read_text() + "late = one_plugin\n")
    assert dict(things) == {"own": 0, "late": 1}
    assert list(things.broken) == ["early"]


def test_names_of_one_module_that_cannot_be_imported_are_left_out_with_one_message(things, tmp_path, capsys):
    file = write_plugin(tmp_path, "one_plugin", adds("new") + "x = y\n", {GROUP: "new"})
    (listed,) = tmp_path.glob("*.dist-info/entry_points.txt")
    listed.write_text(listed.read_text() + "newer = one_plugin\nnewest = one_plugin\n")
    assert list(things) == ["own"]
    sentence = (
        "the things 'new', 'newer' and 'newest' of one_plugin 1.0 are left out: NameError: name 'y' is not defined"
    )
    assert things.broken == dict.fromkeys(["new", "newer", "newest"], f"{sentence}, in {file}, line 3: x = y")
    assert main(["schedule", "1f1b", "--pp", "2", "--num-microbatches", "2"]) == 0
    assert capsys.readouterr().err.count("left out") == 1


def test_a_command_mentions_a_broken_plug_in_once_and_goes_on(things, tmp_path, capsys):
    write_plugin(tmp_path, "one_plugin", "x = y\n", {GROUP: "new"})
    list(things)
    assert main(["schedule", "1f1b", "--pp", "2", "--num-microbatches", "2"]) == 0
    assert capsys.readouterr().err.count("pipeloom schedule: the thing 'new' of one_plugin 1.0 is left out") == 1
    assert "1f1b" in FAMILIES
