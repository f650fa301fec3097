"""Every rank's position is there when one of them waits too long."""

import time

import torch.distributed as dist

from pipeloom.execute.processes.watch import Watch


def test_a_rank_without_progress_is_seen_by_the_others(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    mine = Watch(store, 0, 3, lambda: "rank 0 is at slot 4", quiet_s=0.02)
    other = Watch(store, 1, 3, lambda: "rank 1 is at slot 7", quiet_s=0.02)
    deadline = time.monotonic() + 10
    while "rank 1 is at slot 7" not in mine.positions() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert mine.positions().splitlines() == [
        "  rank 0 is at slot 4",
        "  rank 1 is at slot 7",
        "  process 2 has published no position: it is stopped, or it was at work until a moment ago",
    ]
    mine.end()
    other.end()


def test_a_rank_that_moves_publishes_nothing(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    positions = iter(range(1_000_000))
    watch = Watch(store, 0, 1, lambda: f"slot {next(positions)}", quiet_s=0.01)
    time.sleep(0.2)
    watch.end()
    assert not dist.PrefixStore("pipeloom/position", store).check(["0"])
