"""Seconds of token slices: what a whole sequence takes, shared out, and attention to what comes before."""

from dataclasses import replace

import numpy as np
import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.layers import Pieces
from pipeloom.cost.placed import Placed
from pipeloom.cost.slices import SliceModel
from pipeloom.schedule import Action, Kind
from pipeloom.workload.run import Run

RUN = Run(shape=load_model("llama-3-8b"), seq=4096, pp=4, tp=8, recompute="selective")
CLUSTER, SOFTWARE = load_cluster("dgx-a100"), load_software("pipeloom")


def model(**changes):
    return SliceModel(Placed(replace(RUN, **changes), CLUSTER, SOFTWARE))


def test_one_slice_is_the_whole():
    whole = Placed(RUN, CLUSTER, SOFTWARE).costs
    found = model().costs(whole, (4096,)).slices[0]
    assert found.forward_s == pytest.approx(whole.forward_s)
    assert found.backward_s == pytest.approx(whole.backward_s)


@pytest.mark.parametrize("attention", ["flash2", "plain"])
def test_later_slices_take_longer_by_what_they_see(attention):
    """By the pairs and by the keys before them; small products of plain kernels are a little slower."""
    slices = model(attention=attention)
    costs = [slices.stage_costs(1024, before) for before in (0, 1024, 2048)]
    first, second, third = (np.array(one.forward_s) for one in costs)
    assert (second > first).all()
    assert third - second == pytest.approx(second - first, rel=0.25)
    assert len({one.transfer_s for one in costs}) == 1


@pytest.mark.parametrize("attention", ["flash2", "plain"])
def test_scores_of_all_slices_are_those_of_the_whole(attention):
    """Of plain kernels three quarters, for the first half does not see the second; and keys are read once more."""
    run = replace(RUN, attention=attention)
    whole, first = (Pieces(replace(run, seq=seq), CLUSTER, SOFTWARE) for seq in (4096, 2048))
    second = replace(first, before=2048)
    for one, two, both in zip(first.attention_s(), second.attention_s(), whole.attention_s(), strict=True):
        share = (one + two) / both
        assert 1 < share / {"flash2": 1.0, "plain": 0.75}[attention] < 1.12


def test_keys_before_a_slice_are_moved_however_short_it_is():
    """For a short slice twice the keys take twice as long; for a long one scores take longer."""
    run = replace(RUN, attention="plain", recompute="none")
    few, more, most = (Pieces(replace(run, seq=8), CLUSTER, SOFTWARE, before=n).attention_s() for n in (0, 2048, 4096))
    moved_s = 2 * RUN.shape.kv_width / RUN.tp * 2 * 2048
    moved_s /= CLUSTER.device.memory_bytes_per_s * SOFTWARE.efficiency.memory
    assert more[0] - few[0] > moved_s
    assert more[1] - few[1] > 5 * moved_s
    assert most[1] - more[1] == pytest.approx(more[1] - few[1], rel=0.1)


def test_a_device_that_waits_for_the_host_attends_for_nothing():
    """As long as attention takes less than the wait; what is more counts."""
    slow = replace(CLUSTER, name="slow host", device=replace(CLUSTER.device, launch_s=10 * CLUSTER.device.launch_s))
    slices = SliceModel(Placed(RUN, slow, SOFTWARE))
    alone, behind = slices.stage_costs(128, 0), slices.stage_costs(128, 2048)
    assert behind.forward_s == alone.forward_s
    assert behind.backward_s == alone.backward_s
    assert model().stage_costs(1024, 2048).backward_s > model().stage_costs(1024, 0).backward_s


def test_messages_are_on_the_way_of_a_slice_and_not_in_its_compute():
    slices = model()
    lengths, before = np.array([1024.0, 512.0]), np.array([0.0, 1024.0])
    message_s = [slices.stage_costs(length, 0).transfer_s for length in (1024, 512)]
    assert slices.through_s(lengths, before) - slices.seconds(lengths, before) == pytest.approx(2 * np.array(message_s))
    blocking = SliceModel(Placed(RUN, CLUSTER, replace(SOFTWARE, is_blocking=True)))
    assert (blocking.through_s(lengths, before) == blocking.seconds(lengths, before)).all()


def test_layers_alone_take_no_embedding_and_no_head():
    even = replace(SOFTWARE, partition="even")
    alone = Placed(replace(RUN, shape=replace(RUN.shape, vocab=0)), CLUSTER, even).costs
    whole = Placed(RUN, CLUSTER, even).costs
    assert len(set(alone.forward_s)) == len(set(alone.backward_s)) == 1
    assert alone.forward_s[1:3] == whole.forward_s[1:3]
    assert alone.forward_s[0] < whole.forward_s[0]
    assert alone.backward_s[3] < whole.backward_s[3]


def test_what_concerns_a_stage_is_not_sliced():
    whole = replace(Placed(RUN, CLUSTER, SOFTWARE).costs, unshard_s=(1.0,) * 4, evict_s=(8.0,) * 4)
    costs = model().costs(whole, (3072, 1024))
    assert costs.seconds(Action(Kind.UNSHARD, 2)) == 1.0
    assert costs.seconds(Action(Kind.EVICT, 2, 0, 1)) == 2.0
    assert costs.seconds(Action(Kind.RECV_F, 2, 0, 1)) < costs.seconds(Action(Kind.RECV_F, 2, 0, 0)) < whole.transfer_s


def test_a_table_of_seconds_is_that_of_the_slowest_rank():
    slices = model()
    found = slices.seconds(np.array([1024.0, 512.0]), np.array([1024.0, 0.0]))
    expected = [slices.stage_costs(1024, 1024), slices.stage_costs(512, 0)]
    slowest = int(
        np.argmax(
            np.add(Placed(RUN, CLUSTER, SOFTWARE).costs.forward_s, Placed(RUN, CLUSTER, SOFTWARE).costs.backward_s)
        )
    )
    assert found == pytest.approx([one.forward_s[slowest] + one.backward_s[slowest] for one in expected])
