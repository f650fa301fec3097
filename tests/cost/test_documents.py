"""Attention that ends at documents is priced as it is computed: with a mask, over whole windows."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.config import DataConfig, RunConfig, ScheduleConfig, find_problems
from pipeloom.cost.layers import Pieces
from pipeloom.cost.measured import MeasuredPieces
from pipeloom.cost.pieces import piece_seconds
from pipeloom.families import make_schedule
from pipeloom.predict.describe import described_problems
from pipeloom.predict.memory import memory_by_rank
from pipeloom.workload.layout import Layout
from pipeloom.workload.run import Run

RUN = Run(shape=load_model("llama-3-8b"), seq=4096, pp=4, tp=8, global_batch=8)
MASKED = replace(RUN, by_document=True)
GPUS, SOFTWARE = load_cluster("dgx-a100"), load_software("pipeloom")
# A hundredth of a GPU, which is as fast as a CPU: no multiprocessors, and peaks below 10 TFLOP/s.
CPU = replace(
    GPUS.device,
    num_multiprocessors=0,
    peak_flops_per_s={name: peak / 100 for name, peak in GPUS.device.peak_flops_per_s.items()},
    memory_bytes_per_s=GPUS.device.memory_bytes_per_s / 100,
)
CLUSTER = replace(GPUS, device=CPU)
DOCUMENTS = DataConfig(attention="document")


def test_a_mask_costs_the_half_that_flash_kernels_skip_and_its_bytes():
    plain, masked = (Pieces(run, CLUSTER, SOFTWARE).attention_s() for run in (RUN, MASKED))
    for one, other in zip(plain, masked, strict=True):
        assert 2 < other / one < 3


def test_gpus_skip_keys_and_are_predicted_as_if_they_did_not():
    plain, masked = (Pieces(run, GPUS, SOFTWARE).attention_s() for run in (RUN, MASKED))
    assert plain == masked


def test_slices_of_a_masked_sequence_read_every_score_before_them_once():
    first, second = (Pieces(replace(MASKED, seq=2048), CLUSTER, SOFTWARE, before=n).attention_s()[0] for n in (0, 2048))
    assert second / first == pytest.approx(2, rel=0.05)


def test_measured_seconds_get_the_difference_of_the_closed_forms():
    own = {"embedding": (0.5, 0.25), "layer": (1.0, 2.0), "head": (3.0, 6.0)}
    cluster = replace(CLUSTER, name="measured", pieces=(MeasuredPieces(run=RUN.of_measured_pieces, **own),))
    found, masked = (piece_seconds(run, cluster, SOFTWARE) for run in (RUN, MASKED))
    assert found.is_measured
    assert masked.is_measured
    counted, with_mask = (piece_seconds(run, CLUSTER, SOFTWARE).layer for run in (RUN, MASKED))
    assert masked.layer == pytest.approx((1.0 + with_mask[0] - counted[0], 2.0 + with_mask[1] - counted[1]))
    assert masked.layer > found.layer
    assert masked.head == found.head


def test_a_rank_has_a_mask_for_each_micro_batch_in_flight():
    schedule = make_schedule("1f1b", pp=4, num_microbatches=8)
    plain, masked = (memory_by_rank(replace(run, fused_norm=False), SOFTWARE, schedule, 2) for run in (RUN, MASKED))
    more = [other.activations_bytes - one.activations_bytes for one, other in zip(plain, masked, strict=True)]
    # Rotary angles of two micro-batches and of one have the same size here: one sequence each.
    assert more == [2 * 4096 * 4096 * count for count in (4, 3, 2, 1)]


def test_other_programs_and_slices_without_given_lengths_are_refused():
    config = RunConfig(data=DOCUMENTS, schedule=ScheduleConfig(family="1f1b"), layout=Layout(pp=2, loops=1))
    assert described_problems(config) == []
    other = replace(config, machine=replace(config.machine, software="megatron-2021"))
    (problem,) = described_problems(other)
    assert (
        problem
        == "data.attention document needs machine.software pipeloom, found megatron-2021, which has its own attention"
    )
    (problem,) = find_problems(replace(config, layout=Layout(pp=2, loops=1, token_slices="auto")), trains=False)
    assert problem.startswith("layout.token_slices auto measures slices without the mask of data.attention document")
