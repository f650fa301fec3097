"""``train`` and ``simulate`` make the same schedule of a configuration, or both print that they may not."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeloom.cli import main
from pipeloom.cli.simulate import simulate_config
from pipeloom.cli.train import _announce
from pipeloom.config import DataConfig, ModelConfig, RunConfig, ScheduleConfig, TrainingConfig, find_problems
from pipeloom.errors import UserError
from pipeloom.predict.moves import why_schedules_may_differ
from pipeloom.train.pipeline import training_schedule
from pipeloom.train.session import resolve
from pipeloom.workload.layout import Layout

DATA = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=257))
LOOPS = {"1f1b": (1,), "gpipe": (1,), "zb-h1": (1,), "zb-v": (2,), "v-half": (2,), "dualpipe-v": (2,)}
FAMILIES = ("breadth-first", "depth-first", "hybrid", "interleaved-zb", *LOOPS)


@st.composite
def configs(draw):
    """Small runs of every kind."""
    family, pp = draw(st.sampled_from(FAMILIES)), draw(st.sampled_from((1, 2, 4)))
    loops = draw(st.sampled_from(LOOPS.get(family, (1, 2, 3))))
    tp, dp = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    shard = draw(st.sampled_from(("none", "optimizer", "gradients", "full"))) if dp > 1 else "none"
    balance, offload = pp > 1 and draw(st.booleans()), draw(st.booleans())
    swaps = pp * tp * dp == 1 and loops > 1 and not offload and draw(st.booleans())
    model = ModelConfig(
        family=draw(st.sampled_from(("llama", "gpt2"))),
        num_layers=draw(st.sampled_from((6, 8, 11))),
        hidden_size=96,
        tied=draw(st.booleans()),
    )
    layout = Layout(
        pp=pp,
        loops=loops,
        num_microbatches=draw(st.sampled_from((1, 2, 4, 6, 7))),
        microbatch_size=draw(st.integers(1, 2)),
        tp=tp,
        dp=dp,
        shard=shard,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(("none", "full", "selective"))),
        token_slices=None if swaps else draw(st.sampled_from((None, None, 2, 4))),
    )
    schedule = ScheduleConfig(
        family=family,
        balance=balance,
        offload=offload,
        activation_budget=draw(st.sampled_from(("4MB", "8MB", "28MB"))) if offload else None,
        keep=draw(st.sampled_from((None, (2,) * pp))) if not balance and not offload else None,
        device_budget=draw(st.sampled_from(("8MB", "12MB", "20MB"))) if swaps else None,
    )
    training = TrainingConfig(dtype=draw(st.sampled_from(("float32", "bfloat16"))))
    return RunConfig(model=model, data=DataConfig(seq_len=64), layout=layout, schedule=schedule, training=training)


def made(make):
    """The rows; ``None`` if the schedule was refused."""
    try:
        return make().rows
    except UserError:
        return None


def both(config):
    """The rows of ``train`` and those of ``simulate``."""
    return made(lambda: training_schedule(resolve(config, DATA))), made(lambda: simulate_config(config).schedule)


def run_of(*, tied=False, layout=None, **schedule):
    return RunConfig(
        model=ModelConfig(num_layers=11, hidden_size=96, tied=tied),
        data=DataConfig(seq_len=64),
        layout=Layout(**{"pp": 2, "loops": 2, "num_microbatches": 6} | (layout or {})),
        schedule=ScheduleConfig(**schedule),
    )


SEQUENCE = run_of(layout={"tp": 2, "sequence_parallel": True})
SWAPPED = run_of(tied=True, layout={"pp": 1, "loops": 6}, device_budget="10MB")


@settings(max_examples=25, deadline=None)
@given(configs())
@example(SEQUENCE)
@example(SWAPPED)
def test_both_make_the_same_schedule_or_print_that_they_may_not(config):
    if find_problems(config, trains=False):
        return
    trained, simulated = both(config)
    may_differ = why_schedules_may_differ(config)
    assert trained == simulated or may_differ is not None
    assert (may_differ is not None) == (config.schedule.balance or config.schedule.offload)


def test_what_is_offloaded_within_a_budget_really_differs():
    layout = Layout(pp=2, loops=2, num_microbatches=6)
    config = RunConfig(layout=layout, schedule=ScheduleConfig(offload=True, activation_budget="28MB"))
    trained, simulated = both(config)
    assert trained != simulated
    assert "with schedule.offload train counts the bytes" in str(why_schedules_may_differ(config))


def test_slices_that_are_chosen_may_differ_and_others_may_not():
    auto, four = (run_of(layout={"token_slices": slices}) for slices in ("auto", 4))
    assert "layout.token_slices auto" in str(why_schedules_may_differ(auto))
    assert why_schedules_may_differ(four) is None


@pytest.mark.parametrize("is_noted", [True, False])
def test_both_commands_print_the_note(capsys, is_noted):
    note = "the trained schedule may differ from the simulated one"
    words = ["--schedule.balance"] if is_noted else []
    assert main(["simulate", *words]) == 0
    assert (note in capsys.readouterr().out) == is_noted
    _announce(RunConfig(schedule=ScheduleConfig(balance=is_noted)))
    assert (note in capsys.readouterr().out) == is_noted
