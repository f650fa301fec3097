"""Replicas get micro-batches by their measured speed: the best division, the same training, again while it runs."""

import random
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from types import SimpleNamespace

import pytest
from resumed import losses
from slowed import slow_down
from small_run import small_run

from pipeloom.config import CheckpointConfig, ModelConfig, OutputConfig, ScheduleConfig, TrainingConfig, find_problems
from pipeloom.config.file import read_run_file
from pipeloom.cost.costs import StageCosts
from pipeloom.data.text import load_data
from pipeloom.errors import HostError
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.measure.rehearsal import Rehearsal
from pipeloom.measure.stages import Profile
from pipeloom.planner.run_step import predict_step
from pipeloom.predict.describe import why_training_may_differ
from pipeloom.report import write_report
from pipeloom.runs.run_folder import WARNINGS, RunFolder
from pipeloom.training.automatic import interleaving as automatic
from pipeloom.training.automatic.division import Division, divide
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.run import train
from pipeloom.training.session import resolve
from pipeloom.training.trainer import Trainer
from pipeloom.workload.layout import Layout

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=2)
ALONE = SimpleNamespace(rank=0, from_first=lambda value: value, sum=lambda values: values)
"""A world that decides for itself."""


def run_of(folder, dp=2, steps=3, **settings):
    layout = {"pp": 1, "loops": 1, "num_microbatches": 4, "microbatch_size": 1, "microbatches": "auto"}
    layout |= {key: settings.pop(key) for key in list(settings) if key in Layout.__dataclass_fields__}
    training = {"validation_batches": 1, "sample_tokens": 0, "dtype": "float64", "stall_timeout_s": 20}
    return small_run(
        folder,
        model=MODEL,
        layout=Layout(dp=dp, **layout),
        training=TrainingConfig(steps=steps, **training, **settings),
    )


def resolved(config):
    return resolve(config, load_data(config.data, 0))


@pytest.mark.parametrize("seed", range(20))
def test_no_division_ends_earlier(seed):
    draw = random.Random(seed)
    replicas, total = draw.randint(2, 4), draw.randint(4, 12)
    speeds = [draw.choice([1.0, 1.5, 3.0, 10.0]) for _ in range(replicas)]
    start = [total // replicas + (one < total % replicas) for one in range(replicas)]

    def finish_s(replica, number):
        # Filling a pipeline takes a constant, and steps of any size are allowed.
        return speeds[replica] * (2 + number + (number > 3))

    found = divide(start, finish_s)
    assert sum(found) == total
    assert min(found) >= 1
    every = (one for one in product(range(1, total), repeat=replicas) if sum(one) == total)
    best_s = min(max(finish_s(*one) for one in enumerate(numbers)) for numbers in every)
    assert max(finish_s(*one) for one in enumerate(found)) == best_s


def test_no_replica_gets_more_than_the_most():
    assert divide([4, 4], lambda replica, number: number * (1, 3)[replica]) == (6, 2)
    assert divide([4, 4], lambda replica, number: number * (1, 3)[replica], most=5) == (5, 3)


def test_a_number_that_a_replica_cannot_take_is_not_chosen():
    assert divide([4, 4], lambda replica, number: inf if number % 2 else number * (1, 3)[replica]) == (4, 4)
    assert divide([4, 4], lambda replica, number: inf if number < 3 else number * (1, 3)[replica]) == (5, 3)


def profile_of(*seconds):
    """Replicas with so many seconds of a forward, and twice as many of a backward."""
    found = [Profile(StageCosts((one,), (2 * one,)), ("host",), {"host": 1.0}) for one in seconds]
    return replace(found[0], others=tuple(found[1:]))


def test_the_slowest_replica_ends_as_early_as_possible_by_the_profile(tmp_path):
    config, lines = resolved(run_of(tmp_path, dp=4, num_microbatches=5)), []
    found = Division(config, ALONE).measured(config, profile_of(0.01, 0.03, 0.01, 0.01), lines.append)
    assert found.layout.microbatches == (6, 2, 6, 6)
    assert found.layout.batch_size == config.layout.batch_size
    assert lines == ["replicas   6, 2, 6 and 6 micro-batches; predicted ms: 180, with 5 5 5 5 450"]


def test_equal_replicas_get_as_many_and_the_run_has_numbers(tmp_path):
    config, lines = resolved(run_of(tmp_path)), []
    assert config.layout.microbatch_words == "8 micro-batches (which train divides among replicas)"
    found = Division(config, ALONE).measured(config, profile_of(0.01, 0.01), lines.append)
    assert found.layout.microbatches == (4, 4)
    assert lines == ["replicas   4 and 4 micro-batches; predicted ms: 120, with 4 4 120"]


def test_numbers_that_were_given_are_not_measured(tmp_path):
    config = resolved(run_of(tmp_path, microbatches=(5, 3), num_microbatches=5))
    assert Division(config, ALONE).measured(config, profile_of(1, 1), pytest.fail) is config


def test_memory_limits_the_numbers(tmp_path, monkeypatch):
    def check(config):
        if config.layout.num_microbatches > 5:
            raise HostError("no room for it")

    monkeypatch.setattr(automatic, "check_memory", check)
    config = resolved(run_of(tmp_path))
    found = Division(config, ALONE).measured(config, profile_of(0.01, 0.03), lambda _: None)
    assert found.layout.microbatches == (5, 3)


def test_a_number_for_which_the_family_has_no_schedule_is_not_chosen(tmp_path):
    config = run_of(tmp_path, pp=2, loops=2)
    config = replace(config, model=replace(MODEL, num_layers=4), schedule=ScheduleConfig(family="hybrid", group_size=3))
    profile = profile_of(0.01, 0.03)
    slow, fast = (StageCosts((one,) * 4, (2 * one,) * 4) for one in (0.09, 0.01))
    first = replace(profile, costs=fast, host_by_rank=("host",) * 2, capacity_by_host={"host": 2.0}, others=())
    profile = replace(first, others=(replace(first, costs=slow),))
    found = Division(resolved(config), ALONE).measured(resolved(config), profile, lambda _: None)
    assert found.layout.microbatches == (5, 3)


def test_a_replica_that_gets_slower_takes_less_behind_the_next_steps(tmp_path):
    config = resolved(run_of(tmp_path, dp=4, num_microbatches=5, divide_every=3))
    division, lines = Division(config, ALONE), []
    for seconds in ([0.15, 0.45, 0.15, 0.15], [0.15, 9.0, 0.15, 0.15], [0.15, 0.45, 0.15, 0.15]):
        division.note(seconds)
    assert division.again(config, 2, pytest.fail) is config
    found = division.again(config, 3, lines.append)
    assert found.layout.microbatches == (6, 2, 6, 6)
    assert lines == [
        "step 3: replicas take from here on 6, 2, 6 and 6 micro-batches; predicted ms: 180, with 5 5 5 5 450"
    ]
    # As fast as the others again; the seconds of the steps before are forgotten.
    division.note([0.18, 0.06, 0.18, 0.18])
    assert division.again(found, 6, lines.append).layout.microbatches == (5, 5, 5, 5)


def test_a_division_that_saves_little_is_not_used(tmp_path):
    config = resolved(run_of(tmp_path, num_microbatches=30, divide_every=1))
    division = Division(config, ALONE)
    division.note([0.300, 0.320])
    assert division.again(config, 1, pytest.fail) is config


def test_without_a_number_of_steps_nothing_is_divided_again(tmp_path):
    config = resolved(run_of(tmp_path))
    division = Division(config, ALONE)
    division.note([0.1, 0.9])
    assert division.again(config, 1, pytest.fail) is config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"predict": False},
            "layout.microbatches auto divides by what training.predict measures before the first step",
        ),
        ({"average_every": 2}, "layout.average_every does not work with layout.microbatches; leave one of them out"),
        ({"shard": "full"}, "layout.microbatches does not work with layout.shard full; leave one of them out"),
        ({"dp": 1}, "layout.microbatches has no effect without layout.dp of at least 2"),
        ({"divide_every": 2, "microbatches": None}, "training.divide_every has no effect without layout.microbatches"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(tmp_path, changes, words):
    assert any(words in one for one in find_problems(run_of(tmp_path, **changes)))


def test_numbers_and_steps_may_be_given_together(tmp_path):
    config = run_of(tmp_path, microbatches=(4, 4), predict=False, divide_every=2)
    assert find_problems(config) == []


def test_a_run_goes_on_with_fewer_replicas_of_which_nothing_is_divided(tmp_path):
    config = run_of(tmp_path, dp=4, microbatches=(3, 1, 2, 2), num_microbatches=3, divide_every=2)
    fewer = next(config.layout.with_fewer_replicas(3))
    assert (fewer.dp, fewer.num_microbatches) == (2, 4)
    assert find_problems(config) == find_problems(config.under(fewer)) == []
    assert find_problems(replace(config, layout=fewer)) != []
    assert config.under(config.layout).training.divide_every == 2


def test_the_closed_forms_take_replicas_as_equally_fast(tmp_path):
    config = run_of(tmp_path)
    config = replace(config, training=replace(config.training, dtype="float32"))
    config = replace(config, machine=replace(config.machine, cluster="laptop"))
    even = replace(config, layout=replace(config.layout, microbatches=None))
    assert predict_step(config).prediction == predict_step(even).prediction
    assert "train measures replicas" in why_training_may_differ(config)
    assert why_training_may_differ(even) is None


def _gradients(configs, rendezvous, rank, size):
    """For each run and division the differences of this rank's gradients from those of the first division, by name."""
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    found = []
    for config, *numbers in configs:
        data = load_data(config.data, 0)
        pipeline = Pipeline(resolve(config, data), world)
        windows = data.train.batch(0, config.layout.batch_size)
        every = []
        for one in (None, *numbers):
            if one is not None:
                pipeline.divide(resolve(config, data).divided(one))
            pipeline.train_step(pipeline.batch(windows))
            every.append({name: one.clone() for name, one in pipeline.gradients().items()})
            pipeline.evaluate(pipeline.batch(windows))
        pipeline.close()
        first, *others = every
        found += [{name: float((one[name] - first[name]).abs().max()) for name in first} for one in others]
    world.leave()
    return found


def test_gradients_do_not_depend_on_the_division(tmp_path):
    import torch._dynamo  # noqa: F401  recomputation needs it; once here, not once in every worker

    tied = ModelConfig(num_layers=4, hidden_size=16, num_heads=2, tied=True)
    one, two = run_of(tmp_path, dp=4), replace(run_of(tmp_path, pp=2, loops=2, shard="optimizer"), model=tied)
    load_data(one.data, 0)
    tensor = replace(run_of(tmp_path, tp=2, sequence_parallel=True, recompute="full"), model=tied)
    context = replace(run_of(tmp_path, cp=2), model=MODEL)
    split = replace(run_of(tmp_path, pp=2, loops=1), schedule=ScheduleConfig(family="zb-h1"))
    configs = [(one, (5, 2, 5, 4), (1, 1, 1, 13)), (two, (1, 7), (6, 2))]
    configs += [(config, (3, 5)) for config in (tensor, context, split)]
    every = run_workers(partial(_gradients, configs), 4)
    assert [len(found) for found in every] == [7] * 4
    assert all(every[0])
    assert max(one for found in every for differences in found for one in differences.values()) < 1e-12


def _slowed(jobs, rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    Rehearsal.is_one_thread = False  # seconds of a clock, not of a processor, which sleeps
    slow_down(rank)
    for folder, config in jobs:
        folder.mkdir(exist_ok=True)
        data = load_data(config.data, config.training.seed)
        Trainer(resolve(config, data), world, data, RunFolder(folder), quiet=True).run()
    world.leave()


def test_a_run_divides_before_the_first_step_and_again_with_the_same_batches(tmp_path):
    measured = run_of(tmp_path, steps=2, num_microbatches=2)
    again = run_of(tmp_path, steps=7, num_microbatches=2, microbatches=(2, 2), divide_every=2)
    again = replace(again, output=replace(again.output, trace_step=1))
    even = run_of(tmp_path, steps=7, num_microbatches=2, microbatches=None, predict=False)
    jobs = {tmp_path / name: one for name, one in (("auto", measured), ("again", again), ("even", even))}
    load_data(even.data, 0)
    run_workers(partial(_slowed, list(jobs.items())), 2)
    expected = losses(tmp_path / "even")
    for name in ("auto", "again"):
        written, problems = read_run_file(tmp_path / name / "config.toml")
        assert problems == []
        assert find_problems(written) == []
        assert (written.layout.microbatches, written.layout.num_microbatches) == ((3, 1), 3)
        found = losses(tmp_path / name)
        assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-12)
        last = max(step for step in found)
        assert last == jobs[tmp_path / name].training.steps
    warnings = (tmp_path / "again" / WARNINGS).read_text().splitlines()
    assert len(warnings) == 1
    # Steps 1 to 5 are those of which one is traced, with the numbers that were predicted.
    assert warnings[0].startswith("step 6: replicas take from here on ")
    assert not (tmp_path / "auto" / WARNINGS).exists()
    # Also of a run that goes on with other numbers than those of the trace.
    assert write_report(tmp_path / "again").stat().st_size > 0


def test_a_resumed_run_measures_again_and_goes_on_with_the_same_batches(tmp_path, capfd, monkeypatch):
    config = replace(run_of(tmp_path, steps=3), checkpoint=CheckpointConfig(final="checkpoint"))
    # Numbers change behind the traced step.
    config = replace(config, output=replace(config.output, trace_step=2))
    with monkeypatch.context() as patch:
        # Another division behind step 2, whatever was measured; the ranks are forks of this process.
        patch.setattr(Division, "again", lambda _, run, step, print_line: run.divided((7, 1)) if step == 2 else run)
        train(config)
    assert "\nreplicas   " in capfd.readouterr().out
    assert read_run_file(tmp_path / "run" / "config.toml")[0].layout.microbatches == (7, 1)
    assert (tmp_path / "run" / "actions" / "training.txt").read_text().count("F") == 7  # those of rank 0
    go_on = replace(config, training=replace(config.training, steps=5))
    go_on = replace(go_on, output=OutputConfig(folder=tmp_path / "again"))
    train(replace(go_on, checkpoint=CheckpointConfig(resume=tmp_path / "run", final="none")))
    assert "\nreplicas   " in capfd.readouterr().out
    even = replace(
        go_on, layout=replace(go_on.layout, microbatches=None), output=OutputConfig(folder=tmp_path / "even")
    )
    train(replace(even, training=replace(even.training, predict=False), checkpoint=CheckpointConfig(final="none")))
    expected, found = losses(tmp_path / "even"), losses(tmp_path / "again")
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-12)
    assert set(found) >= {4, 5}
    assert (tmp_path / "again" / "report.html").exists()
