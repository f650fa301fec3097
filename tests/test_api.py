"""The public Python API: its names, their examples, what they cost to import, and what types they have."""

import doctest
import inspect
import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import pipeloom
from pipeloom import passes
from pipeloom.errors import CallError
from pipeloom.families import FAMILIES

HEAVY = ("torch", "matplotlib", "rich", "numba", "pydantic", "numpy")
LEAST_S = 0.3


@pytest.mark.parametrize("name", pipeloom.__all__)
def test_a_name_is_there_and_is_called_so(name):
    value = getattr(pipeloom, name)
    assert name in dir(pipeloom)
    own = f"pipeloom.{name}" if isinstance(value, ModuleType) else {"family": "Family"}.get(name, name)
    assert value.__name__ == own


def test_names_are_sorted_and_those_that_type_checkers_see():
    assert pipeloom.__all__ == sorted(pipeloom.__all__)
    source = inspect.getsource(pipeloom).partition("if TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    seen = {}
    for line in source.splitlines():
        module, _, names = line.removeprefix("    from ").partition(" import ")
        seen |= dict.fromkeys(names.split(", "), module)
    assert seen.pop("passes") == "pipeloom"
    assert seen == {name: f"pipeloom.{module}" for name, module in pipeloom._MODULE_OF.items()}
    assert {*seen, "passes"} == {*pipeloom.__all__}


def test_no_name_hides_a_package_of_another_meaning():
    for name in {*pipeloom.__all__} - {"passes"}:
        with pytest.raises(ModuleNotFoundError):
            import_module(f"pipeloom.{name}")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = pipeloom.simulat


def test_importing_takes_no_time_and_loads_nothing():
    script = "import sys, time; start = time.perf_counter(); import pipeloom; dir(pipeloom)"
    script += "; print(time.perf_counter() - start); import json; print(json.dumps(list(sys.modules)))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    seconds, modules = done.stdout.splitlines()
    assert float(seconds) < LEAST_S
    assert set(HEAVY).isdisjoint(json.loads(modules))


WITHOUT_EXAMPLE = {"passes"}
"""A package, whose functions have their own."""


@pytest.mark.parametrize("name", sorted({*pipeloom.__all__} - WITHOUT_EXAMPLE))
def test_the_docstring_has_an_example_that_runs(name, tmp_path, monkeypatch):
    value = getattr(pipeloom, name)
    finder = doctest.DocTestFinder(recurse=False)
    tests = finder.find(value, name, module=False, globs=vars(import_module(value.__module__)).copy())
    examples = [example for test in tests for example in test.examples]
    assert examples, f"{name} has no example"
    assert "Examples:" in inspect.getdoc(value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FAMILIES, "_values", dict(FAMILIES._values))  # an example adds a family
    for test in tests:
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        printed = []
        runner.run(test, out=printed.append)
        assert runner.failures == 0, "".join(printed)


def test_a_notebook_shows_a_schedule_a_trace_and_a_step_as_a_picture():
    schedule = pipeloom.make_schedule("breadth-first", pp=2, loops=2, num_microbatches=3)
    trace = pipeloom.simulate(schedule, pipeloom.Costs())
    step = pipeloom.predict_step(pipeloom.load_run(layout={"pp": 2, "loops": 2}))
    for value in (schedule, trace, step, pipeloom.plot({"one": schedule, "two": schedule})):
        root = ET.fromstring(value._repr_svg_())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(root.iter())) > 100


def test_a_repr_is_one_short_line_however_large_the_value_is():
    schedule = pipeloom.lower(pipeloom.make_schedule("breadth-first", pp=8, loops=4, num_microbatches=64))
    trace = pipeloom.simulate(schedule, pipeloom.Costs())
    question = pipeloom.make_question("gpt-6.6b", "dgx-a100", num_devices=8, global_batch=8, seq=512)
    step = pipeloom.predict_step(pipeloom.load_run(layout={"pp": 2, "loops": 2}))
    for value in (schedule, schedule.rows[0], trace, trace.spans, question, step, pipeloom.load_run()):
        assert len(repr(value)) < 250
        assert "\n" not in repr(value)
        assert repr(value).startswith(f"{type(value).__name__}(")


def test_schedules_of_other_numbers_of_stages_do_the_same_work_in_a_picture():
    orders = {"whole": pipeloom.make_schedule("gpipe", pp=2, num_microbatches=4)}
    orders |= {"loops": pipeloom.make_schedule("breadth-first", pp=2, loops=4, num_microbatches=4)}
    busy = [pipeloom.summarize(trace).busy_s for trace in pipeloom.plot(orders).panels.values()]
    assert busy == [(12, 12), (12, 12)]


@pytest.mark.parametrize("what", [{}, None, {"a": 3}])
def test_what_cannot_be_drawn_is_refused(what):
    with pytest.raises(pipeloom.UserError, match="expected at least one|what must be a Schedule or a Trace"):
        pipeloom.plot(what)


def test_clocks_of_schedules_and_of_traces_are_not_mixed_in_one_picture():
    schedule = pipeloom.make_schedule("gpipe", pp=2, num_microbatches=2)
    with pytest.raises(pipeloom.UserError, match="whose clocks differ"):
        pipeloom.plot({"a": schedule, "b": pipeloom.simulate(schedule, pipeloom.Costs())})


def test_a_run_reports_everything_that_is_wrong_at_once(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[layout]\npp = 4\nlop = 2\n", encoding="utf-8")
    with pytest.raises(pipeloom.UserError) as raised:
        pipeloom.load_run(file, training={"stepz": 3}, data={"seq_len": 0}, machin={})
    assert re.findall(r"layout\.lop|training\.stepz|data\.seq_len|machin", str(raised.value)) == [
        "layout.lop",
        "training.stepz",
        "machin",
        "machin",
        "data.seq_len",
    ]
    assert pipeloom.load_run(layout={"loops": 1, "partition": [3, 2, 2, 3]}).layout.partition == (3, 2, 2, 3)


@pytest.mark.parametrize("start", [pipeloom.train, pipeloom.verify_gradients, pipeloom.predict_step])
def test_a_configuration_made_by_hand_is_checked_before_anything_starts(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = pipeloom.RunConfig()
    wrong = replace(wrong, layout=replace(wrong.layout, pp=0), data=replace(wrong.data, seq_len=-1))
    with pytest.raises(pipeloom.UserError, match=r"(?s)layout\.pp.*data\.seq_len|data\.seq_len.*layout\.pp"):
        start(wrong)
    assert not list(tmp_path.iterdir())


CALLED_OFTEN = {"forward", "backward"}
"""Families call them for each action, so their calls are checked by Python alone."""
CHECKED = [
    name for name in pipeloom.__all__ if inspect.isfunction(getattr(pipeloom, name)) and name not in CALLED_OFTEN
]
CHECKED += ["Costs", "StageCosts", "Placement.looped", *(f"passes.{name}" for name in passes.__all__ if name.islower())]


@pytest.mark.parametrize("name", CHECKED)
def test_a_call_names_all_of_its_wrong_arguments(name):
    call = attrgetter(name)(pipeloom)
    parameters = inspect.signature(call).parameters.values()
    takes_others = any(one.kind is one.VAR_KEYWORD for one in parameters)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    with pytest.raises(pipeloom.UserError, match=None if takes_others else "no_such_name") as caught:
        call(no_such_name=1)
    assert [one for one in needed if f"the argument '{one}' is missing" not in str(caught.value)] == []
    # Sections of a run are names, which its reader checks.
    assert isinstance(caught.value, TypeError) or (takes_others and not needed)


def test_a_misspelled_a_missing_and_a_wrong_argument_are_one_message():
    unknown = "  - there is no argument 'microbatches'; did you mean 'num_microbatches'? "
    unknown += "known: family, pp, num_microbatches, loops, group_size, placement, num_slices, keep"
    with pytest.raises(CallError) as caught:
        pipeloom.make_schedule("1f1b", pp="4", microbatches=8, loops=True)
    assert str(caught.value).splitlines() == [
        "the call of make_schedule() has 4 problems:",
        unknown,
        "  - the argument 'num_microbatches' is missing; it must be a whole number",
        "  - pp must be a whole number, found '4'",
        "  - loops must be a whole number or None, found True",
    ]


SCHEDULE = pipeloom.make_schedule("gpipe", pp=2, num_microbatches=2)
QUESTION = partial(pipeloom.make_question, "gpt-6.6b", "dgx-a100", num_devices=8, global_batch=8, seq=512)
WRONG_CALLS = {
    "write pp=4, num_microbatches=8": lambda: pipeloom.make_schedule("1f1b", 4, 8),
    "'family' is given twice": lambda: pipeloom.make_schedule("1f1b", family="1f1b", pp=1, num_microbatches=1),
    "costs must be an ActionCosts, found 3.*such as Costs": lambda: pipeloom.simulate(SCHEDULE, 3),
    "(?s)schedule must be a Schedule.*costs must be": lambda: pipeloom.simulate(pipeloom.Costs(), SCHEDULE),
    "config must be a RunConfig, found 'run.toml'.*from load_run": lambda: pipeloom.train("run.toml"),
    "forward_s must be a tuple with each value a number": lambda: pipeloom.StageCosts([1.0], (2.0,)),
    "forward_s must be a number, found '1'": lambda: pipeloom.Costs("1"),
    "count must be at least 1, found 0": lambda: pipeloom.plan(QUESTION(), count=0),
    "budget_s must be above 0, found -1": lambda: pipeloom.plan(QUESTION(), budget_s=-1),
    "num_batches must be at least 1": lambda: pipeloom.verify_gradients(pipeloom.load_run(), num_batches=0),
    "num_ranks must be at least 1": lambda: pipeloom.Placement.looped(0),
    "attention must be 'plain' or": lambda: QUESTION(attention="flash"),
    "did you mean 'dtype'": lambda: QUESTION(dtyp="float32"),
    "pp must be a tuple with each value a whole number": lambda: QUESTION(pp=("a",)),
    "file must be text or a path or None": lambda: pipeloom.plot(SCHEDULE, 3),
}


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_a_wrong_value_is_refused_where_it_is_given(message):
    with pytest.raises(pipeloom.UserError, match=message):
        WRONG_CALLS[message]()


def test_numbers_and_sequences_of_other_libraries_are_taken():
    sizes = {"pp": np.int64(2), "num_microbatches": np.int32(4), "keep": [1, 2]}
    schedule = pipeloom.make_schedule("1f1b", **sizes)
    assert schedule.num_ranks == 2
    assert pipeloom.simulate(schedule, pipeloom.Costs(np.float32(0.5), backward_s=1)).end_s > 4


def test_a_checked_function_can_be_sent_to_another_process():
    assert pickle.loads(pickle.dumps(pipeloom.simulate)) is pipeloom.simulate


def test_a_question_names_everything_that_is_wrong():
    with pytest.raises(pipeloom.UserError) as raised:
        pipeloom.make_question("gpt-7b", "dgx-a10", num_devices=8, global_batch=8, seq=512, ppp=(2,), tp=4)
    for text in ("gpt-7b", "dgx-a10", "'ppp'", "tp must be a sequence"):
        assert text in str(raised.value)


USER = '''
from pathlib import Path

import pipeloom
from pipeloom import Request, Rows, backward, family, forward


@family("typed", is_looped=False)
def typed(request: Request) -> Rows:
    """One micro-batch after the other."""
    ranks = range(request.placement.num_ranks)
    return Rows([[forward(rank, 0), backward(rank, 0)] for rank in ranks], [1 for _ in ranks])


schedule: pipeloom.Schedule = pipeloom.make_schedule("breadth-first", pp=4, loops=4, num_microbatches=8)
trace: pipeloom.Trace = pipeloom.simulate(pipeloom.lower(schedule), pipeloom.Costs(forward_s=0.1, backward_s=0.2))
bubble: float = pipeloom.summarize(trace).bubble_fraction
pipeloom.plot({"one": schedule, "two": trace}, "step.png").save(Path("step.svg"))
action: pipeloom.Action = schedule.rows[0][0]
kind: pipeloom.Kind = action.kind
question = pipeloom.make_question("gpt-6.6b", "dgx-a100", num_devices=8, global_batch=8, seq=512, pp=(2, 4))
best = pipeloom.plan(question, count=1).best
seconds: float | None = None if best is None else best.prediction.step_time_s
config: pipeloom.RunConfig = pipeloom.load_run("run.toml", layout={"pp": 2}, training={"steps": 3})
loss: float | None = pipeloom.train(config, quiet=True).summary.train_loss
equal: bool = pipeloom.verify_gradients(config).is_equal
files: list[Path] = pipeloom.export_weights("run", "weights", dtype="bfloat16")
sharded = pipeloom.passes.add_unshard(pipeloom.lower(schedule), residency=1, prefetch=0)
'''


def check_types(folder, text):
    file = folder / "user.py"
    file.write_text(text, encoding="utf-8")
    (folder / "pyrefly.toml").write_text('preset = "strict"\nproject-includes = ["user.py"]\n', encoding="utf-8")
    command = [sys.executable, "-m", "pyrefly", "check", "--config", str(folder / "pyrefly.toml")]
    source = ["--search-path", str(Path(pipeloom.__file__).parents[1]), "--python-interpreter-path", sys.executable]
    done = subprocess.run([*command, *source], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(find_spec("pyrefly") is None, reason="pyrefly is not installed: pip install '.[dev]'")
def test_a_program_that_uses_the_names_has_strict_types(tmp_path):
    status, printed = check_types(tmp_path, USER)
    assert status == 0, printed
    wrong = USER + 'steps: int = pipeloom.load_run()\nschedule.num_stagez\npipeloom.make_schedule("gpipe", p=4)\n'
    status, printed = check_types(tmp_path, wrong)
    assert status == 1
    assert len(re.findall(r"^ERROR", printed, flags=re.M)) >= 3
