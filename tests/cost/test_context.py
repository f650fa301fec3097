"""Context parallelism: keys and values go around the ranks, beside attention, and each has a part of every sequence."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.exchanges import stage_collectives_s
from pipeloom.cost.layers import Pieces
from pipeloom.cost.memory import kept_bytes, state_bytes, working_bytes
from pipeloom.cost.placed import Placed
from pipeloom.cost.ring import Ring, ring_buffer_bytes
from pipeloom.families import Choice
from pipeloom.planner.comparison import causes
from pipeloom.predict.step import simulate_step
from pipeloom.recipe import Knobs
from pipeloom.workload.run import Run

LLAMA = load_model("llama-3-8b", 32_768)
CLUSTER, MEGATRON, OWN = load_cluster("dgx-h100"), load_software("megatron-core"), load_software("pipeloom")
RUN = Run(shape=LLAMA, seq=32_768, cp=4)


def pair_s(run, *, bytes_per_s=CLUSTER.intra.bytes_per_s, latency_s=CLUSTER.intra.latency_s):
    """Seconds of the keys and values of a rank on a link."""
    size = 2 * run.tokens * run.shape.kv_width / run.tp * 2
    return latency_s + size / (bytes_per_s * MEGATRON.efficiency.p2p)


def test_a_ring_passes_keys_and_values_on_and_their_gradients_back():
    hop_s, both = pair_s(RUN), pair_s(replace(RUN, micro_batch=2))
    forward_s, backward_s = Ring(RUN, CLUSTER, MEGATRON).busy_s()
    assert forward_s == pytest.approx(3 * hop_s)
    # Steps 0, 1: keys and values; 2: with gradients; 3: gradients alone; then the last hop.
    assert backward_s == pytest.approx(2 * hop_s + both + hop_s + hop_s)


def test_what_a_step_of_attention_does_not_hide_is_exposed():
    ring, hop_s = Ring(RUN, CLUSTER, MEGATRON), pair_s(RUN)
    assert ring.exposed_s(4 * hop_s, 8 * hop_s) == pytest.approx((0.0, hop_s))
    assert ring.exposed_s(0.0, 0.0) == pytest.approx(ring.busy_s())
    assert ring.exposed_s(2 * hop_s, 100.0)[0] == pytest.approx(3 * hop_s / 2)


def test_between_nodes_a_hop_takes_the_adapter_of_one_device():
    wide = replace(RUN, cp=16)
    far = {"bytes_per_s": CLUSTER.inter.bytes_per_s / CLUSTER.num_adapters, "latency_s": CLUSTER.inter.latency_s}
    assert Ring(wide, CLUSTER, MEGATRON).busy_s()[0] == pytest.approx(15 * pair_s(wide, **far))
    near = replace(RUN, cp=8)
    assert Ring(near, CLUSTER, MEGATRON).busy_s()[0] == pytest.approx(7 * pair_s(near))


def test_a_rank_has_its_share_of_products_and_scores():
    whole, shared = (Pieces(run, CLUSTER, MEGATRON) for run in (replace(RUN, cp=1), RUN))
    one, other = whole.layer_forward(), shared.layer_forward()
    assert other.matmul_s == pytest.approx(one.matmul_s / 4, rel=0.05)
    assert other.attention_s - shared.ring_s(0) == pytest.approx(one.attention_s / 4, rel=0.01)
    assert whole.ring_s(0) == whole.ring_s(1) == 0


@pytest.mark.parametrize("software", [MEGATRON, OWN])
def test_activations_are_divided_and_the_buffers_of_the_ring_are_counted(software):
    alone = replace(RUN, cp=1)
    assert kept_bytes(RUN, software) == pytest.approx(kept_bytes(alone, software) / 4)
    assert working_bytes(alone, software) == 0
    assert working_bytes(RUN, software) == ring_buffer_bytes(RUN) == RUN.tokens * (4 * 2 * 1024 * 2 + 4 * 4096)


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "full"])
def test_gradients_and_state_are_those_of_as_many_replicas(shard):
    shared = replace(RUN, dp=2, shard=shard)
    replicas = replace(RUN, cp=1, dp=8, shard=shard)
    assert state_bytes(shared, 1e9, OWN) == state_bytes(replicas, 1e9, OWN)
    assert stage_collectives_s(Placed(shared, CLUSTER, OWN)) == stage_collectives_s(Placed(replicas, CLUSTER, OWN))


def test_the_exchange_is_a_cause_of_the_step_and_the_causes_add_up():
    run = replace(RUN, cp=2, seq=2048, global_batch=4)
    step = simulate_step(Placed(run, CLUSTER, MEGATRON), Knobs(choice=Choice(family="1f1b", pp=1, num_microbatches=4)))
    parts = causes(step)
    assert 0 < parts["exposed_context_s"] == step.ring_s.exposed_s < step.ring_s.busy_s
    assert sum(parts.values()) == pytest.approx(step.prediction.step_time_s)
    again = simulate_step(
        Placed(replace(run, recompute="full"), CLUSTER, MEGATRON),
        Knobs(choice=Choice(family="1f1b", pp=1, num_microbatches=4)),
    )
    assert again.ring_s.busy_s > step.ring_s.busy_s
