"""The axes in words, and what follows from their sizes."""

from pipeloom.workload.axes import Axes
from pipeloom.workload.layout import Coordinates, Layout
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Run

SMALL = ModelShape(
    layers=4, hidden=1024, heads=8, kv_heads=2, ffn=4096, family="llama", vocab=32_000, tied=False, name="small"
)


def test_axes_that_few_runs_have_are_named_where_they_have_several_ranks():
    assert Axes(tp=2, pp=4, dp=8).words() == "tp 2, pp 4, dp 8"
    assert Axes(tp=2, cp=2, pp=4, dp=8).words() == "tp 2, cp 2, pp 4, dp 8"
    assert Axes(pp=4, dp=8).product("layout.") == "layout.pp 4 x layout.dp 8 x layout.tp 1"
    assert Axes(cp=2, pp=4).ranks == "4 pipeline x 1 data x 2 context x 1 tensor ranks"
    assert Axes(pp=4).cells == {"tp": "1", "cp": "-", "pp": "4", "dp": "1"}


def test_ranks_of_a_context_axis_are_between_those_of_the_tensor_and_the_data_axis():
    layout = Layout(pp=2, dp=2, cp=2, tp=2, shard="full")
    assert layout.num_ranks == 16
    assert [layout.coordinates(rank).data for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert layout.rank_at(Coordinates(1, 3, 1)) == 15
    assert layout.shard_groups()[0] == [0, 2, 4, 6]
    assert layout.batch_size == 2 * layout.num_microbatches * layout.microbatch_size


def test_state_is_sharded_over_the_data_and_the_context_axis():
    run = Run(shape=SMALL, seq=4096, dp=2, cp=4, shard="full")
    assert (run.data_ranks, run.shard_size, run.sharded) == (8, 8, "full")
    assert (run.rank_seq, run.tokens, run.num_devices) == (1024, 1024, 8)
    assert Run(shape=SMALL, seq=4096, shard="full").sharded == "none"
