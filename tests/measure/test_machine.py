"""The measuring itself, on tiny sizes: everything finite, above zero, sizes rising, as often as announced."""

from math import isfinite
from types import SimpleNamespace

import pytest
import torch
from machines import timing

from pipeloom.errors import ConfigError
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked, num_processes_here
from pipeloom.measure import device, links, machine
from pipeloom.measure.findings import Timing
from pipeloom.measure.host import cpu_name, host_memory_bytes, num_devices
from pipeloom.measure.stopwatch import LEAST, Stopwatch, now, on_device, on_host


def measure_tiny(per_host, rendezvous, rank, size):
    """What a worker does; it changes its own process's constants."""
    device.WIDTHS, links.SIZES = {"cpu": (16, 32, 48)}, {"cpu": (1024, 4096, 65536)}
    device._LARGE_BYTES = {"cpu": 2**16}
    world, shown = join_forked(rendezvous, rank, size, "cpu", 30), []
    announced = machine._num_measurements(world, per_host)
    found = machine.measure_on(world, 1.0, per_host, shown.append)
    world.leave()
    return found, len(shown), announced


class TinyOn:
    """Picklable, and it returns how many processes a host has."""

    def __init__(self, per_host):
        self.per_host = per_host

    def __call__(self, rendezvous, rank, num_ranks):
        return measure_tiny(self.per_host, rendezvous, rank, num_ranks)


def timings(found):
    yield from (product.timing for product in found.products)
    yield from (found.kernel, found.launch, found.copy.timing, found.add.timing)
    for part in (found.intra, found.inter, *found.collectives):
        yield from (time for _, time in (part.points if part else ()))


@pytest.fixture(scope="module")
def two_hosts():
    """Four processes, as if two hosts had two each."""
    return run_workers(TinyOn(2), 4)


def test_everything_is_finite_and_above_zero(two_hosts):
    found, _, _ = two_hosts[0]
    assert all(isfinite(t.median_s) and 0 < t.median_s < 10 and t.repeats >= 2 for t in timings(found))
    assert 0 < found.core_share <= 1.1
    assert found.seconds < 60


def test_sizes_rise(two_hosts):
    found, _, _ = two_hosts[0]
    for name in {product.precision for product in found.products}:
        sizes = [product.flops for product in found.products if product.precision == name]
        assert sizes == [2.0 * width**3 for width in (16, 32, 48)]
    for part in (found.intra, found.inter):
        assert [size for size, _ in part.points] == [1024, 4096, 65536]
    assert {(c.collective, c.ranks) for c in found.collectives} == {
        (kind, 2) for kind in ("all_reduce", "all_gather", "reduce_scatter")
    }


def test_every_precision_is_measured_or_reported_as_slow(two_hosts):
    found, _, _ = two_hosts[0]
    assert {product.precision for product in found.products} | set(found.too_slow) == {"fp32", "bf16"}
    assert "fp32" not in found.too_slow


def test_between_hosts_all_pairs_work_at_once(two_hosts):
    found, _, _ = two_hosts[0]
    assert (found.intra.num_pairs, found.inter.num_pairs) == (1, 2)
    assert (found.num_processes, found.per_host) == (4, 2)


def test_every_rank_makes_as_many_measurements_as_were_announced(two_hosts):
    assert len({(shown, announced) for _, shown, announced in two_hosts}) == 1
    assert two_hosts[0][1] == two_hosts[0][2]


def test_one_process_measures_no_links():
    found, shown, announced = run_workers(TinyOn(1), 1)[0]
    assert found.intra is found.inter is None
    assert found.collectives == ()
    assert shown == announced


def test_three_processes_share_a_tensor_evenly():
    found, _, _ = run_workers(TinyOn(3), 3)[0]
    assert {c.ranks for c in found.collectives} == {2, 3}
    for size in (size for c in found.collectives for size, _ in c.points):
        assert size % 4 == 0
    assert [size for size, _ in found.collectives[-1].points] == [1032, 4104, 65544]


@pytest.mark.parametrize(
    ("per_host", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
def test_collectives_are_measured_with_powers_of_two_and_with_all(per_host, sizes):
    assert links.group_sizes(per_host) == sizes


class Alone:
    """A world of one process without torch.distributed."""

    device = torch.device("cpu")

    def wait_for_all(self):
        pass

    def broadcast(self, value, source):
        return value


def test_a_steady_measurement_ends_early():
    watch = Stopwatch(Alone(), 1000.0, 1, lambda what: None)
    assert watch.time("steady", lambda runs: 0.5) == Timing(0.5, 0.0, LEAST)


def test_an_unsteady_measurement_ends_when_its_time_is_spent():
    values = iter(range(1, 10_000))
    watch = Stopwatch(Alone(), 0.0, 1, lambda what: None)
    assert watch.time("unsteady", lambda runs: float(next(values))).repeats == 2


def test_an_unsteady_measurement_is_repeated_more_often_than_a_steady_one():
    values = iter([1.0, 2.0] * 5000)
    watch = Stopwatch(Alone(), 1000.0, 1, lambda what: None)
    assert watch.time("unsteady", lambda runs: next(values)).repeats > 10 * LEAST


def test_short_things_are_run_many_times_a_sample_and_long_ones_once():
    requested = []
    watch = Stopwatch(Alone(), 0.0, 2, lambda what: None)
    for seconds in (1e-4, 5.0):
        watch.time("something", lambda runs, seconds=seconds: requested.append(runs) or seconds)
    assert requested == [1, 1, 20, 20, 1, 1, 1, 1]


def test_a_sample_is_the_time_of_one_run():
    done = []
    for clock in (on_host, on_device):
        begin = now(Alone.device)
        each = clock(Alone.device, lambda: done.append(1))(100)
        assert 0 < 100 * each <= now(Alone.device) - begin
    assert len(done) == 200


def slow_precision(name, rate):
    """A stopwatch that finds products of this precision this fast, and others at 1e11 FLOP/s."""
    skipped = []

    def time(what, sample):
        found, width = what.split()[0], int(what.split()[-1])
        return timing(2.0 * width**3 / (rate if found == name else 1e11))

    watch = SimpleNamespace(world=Alone(), time=time, agree=bool, skip=skipped.append)
    return watch, skipped


def test_a_precision_that_is_emulated_is_left_out_after_one_look():
    watch, skipped = slow_precision("bf16", 2e10)
    products, too_slow = device.measure_products(watch)
    assert {product.precision for product in products} == {"fp32"}
    assert too_slow == {"bf16": pytest.approx(2e10)}
    assert skipped == [len(device.WIDTHS["cpu"]) - 1]


def test_a_precision_that_is_merely_slower_is_kept():
    watch, skipped = slow_precision("bf16", 3e10)
    products, too_slow = device.measure_products(watch)
    assert [p.flops for p in products if p.precision == "bf16"] == [2.0 * w**3 for w in device.WIDTHS["cpu"]]
    assert not too_slow
    assert not skipped


def test_the_cpu_has_a_name_and_memory(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Some CPU @ 3 GHz\n\nprocessor : 1\nmodel name\t: Some CPU @ 3 GHz\n")
    assert cpu_name(info) == "Some CPU @ 3 GHz"
    assert cpu_name(tmp_path / "nothing")
    assert num_devices("cpu") >= 1
    limit = tmp_path / "memory.max"
    limit.write_text("1000000\n")
    assert host_memory_bytes(limit) == 1e6
    limit.write_text("max\n")
    assert host_memory_bytes(limit) == host_memory_bytes(tmp_path / "nothing") > 1e6


def test_all_wrong_numbers_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        machine.Request.make("cpu", 0, -1.0)
    assert caught.value.problems == (
        "--processes must be at least 1, found 0",
        "--budget-s must be a number of seconds above 0, found -1",
    )


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a CUDA device")
def test_a_machine_without_cuda_is_refused():
    with pytest.raises(ConfigError, match="needs a CUDA device that PyTorch sees, found none; use --device cpu"):
        machine.Request.make("cuda", None, 1.0)
    assert machine.Request.make(None, None, 1.0).kind == "cpu"


def test_too_few_cuda_devices_are_refused(monkeypatch):
    monkeypatch.setattr(machine, "num_devices", lambda kind: 2)
    with pytest.raises(ConfigError, match="one CUDA device for each of 4 processes on a host, found 2; use --proc"):
        machine.Request.make("cuda", 4, 1.0)
    assert machine.Request.make("cuda", None, 1.0).num_processes == 2


def test_as_many_processes_as_cores_but_at_most_eight(monkeypatch):
    monkeypatch.setattr(machine, "num_devices", lambda kind: 64 if kind == "cpu" else 0)
    assert machine.Request.make(None, None, 1.0).num_processes == 8
    assert machine.Request.make(None, 16, 1.0).num_processes == 16


def test_a_launcher_says_how_many_processes_there_are(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert machine.Request.make("cpu", None, 1.0).num_processes == 4
    assert num_processes_here(4) == 2
    with pytest.raises(ConfigError, match="--processes is 3, but the launcher started 4"):
        machine.Request.make("cpu", 3, 1.0)
