"""The bytes that closed forms have for a run's stages are those that are counted on its stages."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import thinned

from pipeloom.config import DataConfig, ModelConfig, RunConfig, ScheduleConfig, TrainingConfig
from pipeloom.execute.stages.saved import Parcel
from pipeloom.model import stage_pieces
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.recipe import build
from pipeloom.training.stages import StageSizes, saved_bytes, stage_of
from pipeloom.workload.layout import Layout

KINDS = ("none", "selective", "full")


@st.composite
def runs(draw):
    """Runs of small models: what a stage keeps depends on all that is drawn."""
    layers, tp = draw(st.integers(1, 5)), draw(st.sampled_from((1, 1, 2, 4)))
    cuts = sorted(draw(st.sets(st.integers(1, layers + 1), max_size=layers + 1)))
    partition = tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, layers + 2], strict=True))
    by_layer = draw(st.none() | st.tuples(*[st.sampled_from(KINDS)] * layers))
    device_budget = len(partition) > 1 and tp == 1 and draw(st.booleans())
    return RunConfig(
        model=ModelConfig(
            family=draw(st.sampled_from(("llama", "gpt2", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3"))),
            num_layers=layers,
            hidden_size=draw(st.sampled_from((32, 96))),
            num_heads=8,
            num_kv_heads=draw(st.sampled_from((None, 4, 8))),
            head_size=draw(st.sampled_from((None, 6))),
            ffn_size=draw(st.sampled_from((None, 100))),
            tied=draw(st.booleans()),
            window=draw(st.sampled_from((None, 5, 16, 40))),
            full_attention_layers=draw(st.sampled_from((None, (), (0,)))),
            logit_softcap=draw(st.sampled_from((None, 20.0))),
        ).resolve(draw(st.sampled_from((257, 300)))),
        data=DataConfig(
            seq_len=draw(st.sampled_from((16, 64))), attention=draw(st.sampled_from(("window", "window", "document")))
        ),
        layout=Layout(
            pp=1 if device_budget else len(partition),
            loops=len(partition) if device_budget else 1,
            microbatch_size=draw(st.integers(1, 3)),
            num_microbatches=2,
            tp=tp,
            sequence_parallel=tp > 1 and draw(st.booleans()),
            recompute=draw(st.sampled_from(KINDS)) if by_layer is None else "none",
            recompute_layers=by_layer,
            token_slices=None if device_budget else draw(st.sampled_from((None, 2, 4))),
            partition=partition,
        ),
        schedule=ScheduleConfig(
            family="breadth-first" if device_budget else draw(st.sampled_from(("gpipe", "zb-h1"))),
            device_budget="1GB" if device_budget else None,
        ),
        training=TrainingConfig(
            dtype=draw(st.sampled_from(("float32", "bfloat16"))), device=draw(st.sampled_from(("cpu", "cuda")))
        ),
    )


def assert_counted(config):
    closed, counted = sizes_in_training(config), StageSizes(config)
    schedule = build(config.recipe(), counted)
    forms, found = closed.kept(schedule), counted.kept(schedule)
    assert forms._replace(pending=forms.pending if found.pending else (), shares=list(forms.shares)) == found
    if config.schedule.budget_bytes is not None:
        assert closed.stages() == counted.stages()


@settings(max_examples=20, deadline=None)
@given(runs())
def test_closed_forms_are_what_is_counted_on_meta_tensors(config):
    assert_counted(config)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(runs())
def test_closed_forms_are_what_is_counted_on_more_meta_tensors(config):
    assert_counted(config)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3"])
@pytest.mark.parametrize("recompute", KINDS)
@pytest.mark.parametrize("num_kv_heads", thinned([2, 4], 2))
def test_what_is_counted_on_meta_tensors_is_what_stages_keep(family, recompute, num_kv_heads):
    model = ModelConfig(family=family, num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=num_kv_heads, window=6)
    config = RunConfig(
        model=model.resolve(257),
        data=DataConfig(seq_len=16),
        layout=Layout(pp=3, recompute=recompute, partition=(2, 2, 1)),
        training=TrainingConfig(dtype="float32"),
    )
    tokens = torch.zeros((config.layout.microbatch_size, 16), dtype=torch.int64)
    found = []
    tensor = tokens
    for number, pieces in enumerate(stage_pieces(config.layout.partition)[:2]):
        module, parcel = stage_of(config, pieces, "cpu"), Parcel(owns_input=number > 0)
        module.set_recompute((recompute,) * 3)
        given_tensor = tensor.detach().requires_grad_(number > 0)
        with parcel.saving():
            tensor = module(given_tensor)
        parcel.close(given_tensor, tensor)
        found.append(parcel.nbytes)
    assert found == saved_bytes(config).whole[:2]
    assert saved_bytes(replace(config, training=TrainingConfig(dtype="float64"))).whole[0] > found[0] > 0
