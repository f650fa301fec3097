"""``pipeloom verify`` accepts equal gradients, and refuses others."""

import pytest
from small_run import write_text
from thinned import thinned

from pipeloom.cli import main
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.stages.stage import Stage


def arguments(folder, *more):
    sizes = ["--model.num-layers", "4", "--model.hidden-size", "16", "--model.num-heads", "2", "--data.seq-len", "8"]
    data = ["--data.path", str(write_text(folder)), "--data.cache", str(folder / "cache")]
    return ["verify", *sizes, *data, "--layout.pp", "2", "--layout.num-microbatches", "4", *more]


@pytest.mark.parametrize("dtype", thinned(["bfloat16", "float32", None], 3))
def test_equal_gradients_are_reported_by_name(tmp_path, capsys, dtype):
    assert main(arguments(tmp_path, *(("--training.dtype", dtype) if dtype else ()))) == 0
    printed = capsys.readouterr().out
    assert (dtype or "float64") in printed
    assert "EQUAL: loss, gradient norm and" in printed
    for name in ("loss", "gradient norm", "embedding.tokens.weight", "layers.3.feed_forward.down.weight"):
        assert f"\n{name} " in printed


def test_replicas_that_share_everything_are_equal_too(tmp_path, capsys):
    assert main(arguments(tmp_path, "--layout.dp", "2", "--layout.shard", "full")) == 0
    printed = capsys.readouterr().out
    assert "2 replicas, shard full" in printed
    assert "EQUAL" in printed


def test_a_reduction_that_forgets_a_replica_is_found(tmp_path, capsys, monkeypatch):
    honest = DataParallel.reduce

    def forgetful(self, stage):
        if stage == 1 and self._groups.shard.index == 1:
            self._open[self.weights[stage]].zero_()
        return honest(self, stage)

    monkeypatch.setattr(DataParallel, "reduce", forgetful)
    assert main(arguments(tmp_path, "--layout.dp", "2", "--layout.shard", "gradients")) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_a_wrong_gradient_is_found_and_named(tmp_path, capsys, monkeypatch):
    """Workers are forked, so they run with the sabotaged stage."""
    honest = Stage.backward

    def forgetful(self, part, gradient):
        if self.index == 2 and part.microbatch == 3:
            gradient = gradient * 1.001
        return honest(self, part, gradient)

    monkeypatch.setattr(Stage, "backward", forgetful)
    assert main(arguments(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT" in printed
    wrong = [line.split()[0] for line in printed.splitlines() if line.endswith("DIFFERS")]
    assert "layers.0.attention.query.weight" in wrong  # an earlier stage, which got the wrong gradient
    assert "head.output.weight" not in wrong  # a later stage, which did not
    assert "loss" not in wrong


def test_a_lost_microbatch_is_found(tmp_path, monkeypatch):
    honest = Stage.backward

    def lossy(self, part, gradient):
        for parameter in self.module.parameters():
            if part.microbatch == 3:
                parameter.grad = None  # the last micro-batch's gradient instead of the sum
        return honest(self, part, gradient)

    monkeypatch.setattr(Stage, "backward", lossy)
    assert main(arguments(tmp_path)) == 1


def test_a_device_budget_is_no_question_for_verify(capsys):
    words = ["--layout.pp", "1", "--layout.loops", "4", "--schedule.device-budget", "20MiB"]
    assert main(["verify", *words]) == 2
    assert "expected no schedule.device_budget" in capsys.readouterr().err


def test_rounded_messages_are_no_question_for_verify(capsys):
    assert main(["verify", "--layout.boundary", "int8"]) == 2
    assert "expected no layout.boundary: int8 rounds what travels between ranks" in capsys.readouterr().err
