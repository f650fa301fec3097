"""States in shared memory: two in a file, and always one that all ranks have."""

import pytest

from pipeloom.checkpoint.checkpoint_folder import CheckpointInfo
from pipeloom.checkpoint.kept_files import KeptFile, KeptTensor, check_room, file_of, newest_kept
from pipeloom.errors import HostError

TENSOR = KeptTensor("model.weight", "float32", (4,), (0,), (4,), 0, 4, 0)


def info(step):
    return CheckpointInfo(step, 8 * step, 64 * step, {"hidden_size": 4}, {"text": "x"}, {}, {}, sources=[{"a": step}])


def made(folder, rank=0):
    return KeptFile.create(file_of(folder, rank), [TENSOR], 64)


def keep(file, step):
    index = file.begin()
    file.memory(index)[:4] = step.to_bytes(4, "little")
    file.end(index, info(step))


def test_a_file_has_the_last_two_states_with_their_descriptions(tmp_path):
    file = made(tmp_path)
    assert file.steps == (0, 0)
    for step in (3, 4, 5):
        keep(file, step)
    again = KeptFile(file_of(tmp_path, 0))
    assert sorted(again.steps) == [4, 5]
    assert again.tensors == (TENSOR,)
    for step in (4, 5):
        assert again.info(step) == info(step)
        assert int.from_bytes(again.memory(again.steps.index(step))[:4], "little") == step


def test_a_state_that_is_being_written_does_not_count(tmp_path):
    file = made(tmp_path)
    keep(file, 1)
    keep(file, 2)
    file.begin()
    assert sorted(KeptFile(file_of(tmp_path, 0)).steps) == [0, 2]


def test_ranks_agree_on_the_newest_state_that_all_have(tmp_path):
    files = [made(tmp_path, rank) for rank in range(3)]
    assert newest_kept(tmp_path, 3) is None
    for file in files:
        keep(file, 6)
    keep(files[0], 7)
    keep(files[1], 7)
    assert newest_kept(tmp_path, 3) == 6
    assert newest_kept(tmp_path, 4) is None
    files[2].begin()  # killed while it wrote the first one again
    assert newest_kept(tmp_path, 3) == 6
    file_of(tmp_path, 1).write_bytes(b"")
    assert newest_kept(tmp_path, 3) is None


def test_later_states_are_forgotten_so_that_the_common_one_stays(tmp_path):
    file = made(tmp_path)
    keep(file, 6)
    keep(file, 7)
    file.forget_after(6)
    assert sorted(file.steps) == [0, 6]
    keep(file, 7)
    assert sorted(file.steps) == [6, 7]


def test_too_little_room_is_refused_with_both_numbers(tmp_path):
    check_room(1, tmp_path)
    with pytest.raises(
        HostError, match=r"restart\.times keeps the last 2 states .* takes about 1.*; .* are free there"
    ):
        check_room(1e18, tmp_path)
    with pytest.raises(HostError, match="found none; leave it out"):
        check_room(1, tmp_path / "nowhere")
