"""Metrics of each step: what they contain, and where else they are logged."""

import gzip
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_run import small_run

from pipeloom import Costs, lower, make_schedule, simulate
from pipeloom.analysis.summary import communication, exposed_s, summarize
from pipeloom.config import OutputConfig, RunConfig, find_problems
from pipeloom.config import problems as problems_module
from pipeloom.cost.flops import shape_model_flops
from pipeloom.training.records.loggers import MetricLog
from pipeloom.training.records.step_metrics import StepMeter
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout
from pipeloom.workload.model import shape_of

LINE = {"step": 7, "loss": 2.5, "memory_bytes": [100, 200]}
WRITTEN = {"loss": 2.5, "memory_bytes/rank 0": 100, "memory_bytes/rank 1": 200}


def config_of(name):
    return RunConfig(output=OutputConfig(log=name))


def test_exposed_seconds_are_those_with_communication_and_without_compute():
    trace = simulate(lower(make_schedule("1f1b", pp=4, num_microbatches=6)), Costs(1.0, 2.0, 0.5))
    for rank in range(4):
        uses = [use for use in communication(trace) if use.rank == rank]
        found = exposed_s(trace, rank)
        # Lanes may communicate at the same time, so their sum counts such seconds more than once.
        assert max(use.exposed_s for use in uses) <= found <= sum(use.exposed_s for use in uses)
        assert found <= trace.end_s - trace.start_s - summarize(trace).busy_s[rank]
    assert exposed_s(simulate(make_schedule("gpipe", pp=1, num_microbatches=2), Costs(1.0, 2.0)), 0) == 0


def test_the_metrics_of_a_step_are_those_of_its_trace():
    config = small_run_config()
    layout = config.layout
    trace = simulate(lower(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=4)), Costs(1.0, 2.0))
    sums = [0.0] * (7 + layout.pp)
    for rank in range(layout.num_ranks):
        meter = StepMeter(config, SimpleNamespace(rank=rank, device=torch.device("cpu")))
        own = meter.own(SimpleNamespace(trace=trace), 0.25)
        sums = [one + other for one, other in zip(sums, own, strict=True)]
    found = meter.metrics(sums, 1000.0)
    assert found["bubble_fraction"] == pytest.approx(summarize(trace).bubble_fraction)
    assert found["exposed_communication_s"] == pytest.approx(sum(exposed_s(trace, rank) for rank in range(2)) / 2)
    assert len(found["memory_bytes"]) == 2
    assert min(found["memory_bytes"]) > 2**20
    flops = shape_model_flops(shape_of(config.model), config.data.seq_len)
    assert found["model_flops_per_s"] == pytest.approx(1000 * flops / layout.num_ranks)
    assert "mfu" not in found  # this processor has no datasheet's peak


def small_run_config():
    config = RunConfig(layout=Layout(pp=2, loops=2, dp=2, num_microbatches=4))
    return replace(config, model=config.model.resolve(257))


def test_mfu_is_the_share_of_the_datasheets_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    config = small_run_config()
    config = replace(config, training=replace(config.training, dtype="bfloat16"))
    meter = StepMeter(config, SimpleNamespace(rank=0, device=torch.device("cuda", 0)))
    found = meter.metrics([0.0] * 7, 1e6)
    assert found["mfu"] == pytest.approx(found["model_flops_per_s"] / 989e12)


def test_a_run_writes_them_to_tensorboard_and_profiles_a_step(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    output = OutputConfig(folder=tmp_path / "run", log="tensorboard", profile=(2,))
    config = small_run(tmp_path, output=output)
    config = replace(config, layout=replace(config.layout, pp=1))
    training = replace(config.training, predict=False, validation_batches=0, sample_tokens=0)
    train(replace(config, training=training), quiet=True)
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "grad_norm", "bubble_fraction", "memory_bytes/rank 0"} <= set(events.Tags()["scalars"])
    assert [one.step for one in events.Scalars("loss")] == [1, 2, 3]
    (profile,) = (tmp_path / "run" / "profile").iterdir()
    assert profile.name == "step-000002-rank-0000.json.gz"
    found = {event["name"] for event in json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]}
    assert "aten::linear" in found
    assert [one.value for one in events.Scalars("loss")] == pytest.approx([line["loss"] for line in lines])


def test_steps_that_are_done_again_replace_the_earlier_ones(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first in (1, 3):
        with MetricLog(config_of("tensorboard"), tmp_path) as log:
            for step in range(first, 5):
                log.add({"step": step, "loss": 10.0 * first + step})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(1, 11), (2, 12), (3, 33), (4, 34)]


def test_wandb_has_one_run_for_all_processes_of_a_folder(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end"))
    begun = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **all_: begun.append(all_) or run))
    for _ in range(2):
        with MetricLog(config_of("wandb"), tmp_path) as log:
            log.add(LINE)
    assert calls == [(7, WRITTEN), "end"] * 2
    assert begun[0] == begun[1]
    assert begun[0]["project"] == "pipeloom"
    assert begun[0]["id"] != "" != begun[0]["name"] == tmp_path.name
    assert begun[0]["config"]["output"]["log"] == "wandb"


def test_mlflow_gets_a_store_in_the_run_folder_without_a_server(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    calls = []
    names = ("set_tracking_uri", "start_run", "log_dict", "log_metrics", "end_run")
    fake = {name: (lambda *words, _name=name, **more: calls.append((_name, words, more))) for name in names}
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(**fake))
    with MetricLog(config_of("mlflow"), tmp_path) as log:
        log.add(LINE)
    assert calls[0] == ("set_tracking_uri", ((tmp_path / "mlruns").as_uri(),), {})
    assert ("log_metrics", (WRITTEN,), {"step": 7}) in calls
    assert [name for name, *_ in calls] == list(names)


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_logger_that_fails_is_a_warning_and_is_called_no_more(tmp_path, monkeypatch, capsys, fails):
    def fail(*_, **__):
        raise ConnectionError("no route to host\x1b[2J")

    calls = []
    run = SimpleNamespace(log=lambda *_, **__: calls.append("log"), finish=lambda: calls.append("finish"))
    wandb = SimpleNamespace(init=lambda **_: run)
    setattr(wandb if fails == "init" else run, fails, fail)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with MetricLog(config_of("wandb"), tmp_path) as log:
        log.add(LINE)
        log.add(LINE)
    printed = capsys.readouterr().err
    assert printed.count("pipeloom train: warning: output.log wandb stopped: no route to host") == 1
    assert "\x1b" not in printed
    assert calls == {"init": [], "log": [], "finish": ["log", "log"]}[fails]


def test_a_missing_package_is_reported_before_the_run(monkeypatch):
    monkeypatch.setattr(problems_module, "find_spec", lambda _: None)
    found = find_problems(config_of("tensorboard"))
    assert "output.log tensorboard needs a package that is missing: pip install 'pipeloom[log]'" in found
    assert not [one for one in find_problems(config_of("tensorboard"), trains=False) if "output.log" in one]


def test_a_step_that_is_never_done_cannot_be_profiled():
    config = RunConfig(output=OutputConfig(profile=(0, 3, 70)))
    config = replace(config, training=replace(config.training, steps=60))
    assert "output.profile must be steps from 1 to training.steps 60, found [0, 70]" in find_problems(config)


def test_without_a_logger_nothing_is_imported(tmp_path):
    with MetricLog(RunConfig(), tmp_path) as log:
        log.add(LINE)
    assert list(tmp_path.iterdir()) == []
