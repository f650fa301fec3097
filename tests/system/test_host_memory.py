"""Memory that is there, as a Linux shows it."""

import math
import resource

import pytest

from pipeloom.system.host_memory import address_space, available_memory

GIBI = 2**30


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemAvailable:   {32 * 2**20} kB\n")
    return tmp_path


def write(root, name, text):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_without_control_groups_it_is_what_the_kernel_calls_available(root):
    assert available_memory(root) == (32 * GIBI, "free on this host")


def test_where_nothing_says_nothing_limits(tmp_path):
    assert available_memory(tmp_path).size_bytes == math.inf


def test_a_limit_of_a_group_counts_without_what_only_holds_files(root):
    write(root, "proc/self/cgroup", "0::/user/job\n")
    write(root, "sys/fs/cgroup/user/job/memory.max", f"{8 * GIBI}\n")
    write(root, "sys/fs/cgroup/user/job/memory.current", f"{5 * GIBI}\n")
    write(root, "sys/fs/cgroup/user/job/memory.stat", f"anon 7\ninactive_file {GIBI}\nactive_file {GIBI}\n")
    assert available_memory(root) == (5 * GIBI, "left of the limit of the control group")


def test_a_limit_of_a_group_around_it_counts(root):
    write(root, "proc/self/cgroup", "0::/user/job\n")
    write(root, "sys/fs/cgroup/user/job/memory.max", "max\n")
    write(root, "sys/fs/cgroup/user/job/memory.current", "1000\n")
    write(root, "sys/fs/cgroup/user/memory.max", f"{2 * GIBI}\n")
    write(root, "sys/fs/cgroup/user/memory.current", f"{3 * GIBI}\n")
    assert available_memory(root).size_bytes == 0


@pytest.mark.parametrize("folder", ["memory/docker/one", "memory"])
def test_the_first_version_of_control_groups_is_read(root, folder):
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/docker/one\n4:memory:/docker/one\n0::/\n")
    write(root, f"sys/fs/cgroup/{folder}/memory.limit_in_bytes", f"{4 * GIBI}\n")
    write(root, f"sys/fs/cgroup/{folder}/memory.usage_in_bytes", f"{2 * GIBI}\n")
    write(root, f"sys/fs/cgroup/{folder}/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIBI}\n")
    assert available_memory(root).size_bytes == 3 * GIBI


def test_a_group_without_a_limit_changes_nothing(root):
    write(root, "proc/self/cgroup", "4:memory:/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n")
    assert available_memory(root) == (32 * GIBI, "free on this host")


def test_addresses_that_are_mapped_already_are_no_longer_there(tmp_path, monkeypatch):
    assert address_space().size_bytes > 0
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * GIBI, 8 * GIBI))
    write(tmp_path, "proc/self/statm", f"{2 * GIBI // resource.getpagesize()} 5 5 5 0 5 0\n")
    assert address_space(tmp_path).size_bytes == 6 * GIBI
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert address_space(tmp_path).size_bytes == math.inf
