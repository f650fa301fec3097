"""A state in shared memory is read back by ranks of any layout."""

import pytest
import torch

from pipeloom.checkpoint.checkpoint_folder import CheckpointInfo
from pipeloom.errors import RunError
from pipeloom.training.checkpoints.boxes import Elements
from pipeloom.training.checkpoints.kept import Kept, recall

WHOLE = torch.arange(60, dtype=torch.float64).view(6, 10)
INFO = CheckpointInfo(3, 24, 192, {}, {}, {}, {})


def rows(first, end):
    """Rows of the matrix, as a rank of tensor parallelism holds them."""
    part = (end - first, 10)
    return Elements(WHOLE[first:end].reshape(-1).clone(), (6, 10), (first, 0), part, 0)


def interval(first, end):
    """Elements of the flattened matrix, as a shard holds them."""
    return Elements(WHOLE.view(-1)[first:end].clone(), (6, 10), (0, 0), (6, 10), first)


def columns(first, end):
    part = (6, end - first)
    return Elements(WHOLE[:, first:end].reshape(-1).clone(), (6, 10), (0, first), part, 0)


CUTS = {
    "whole": [interval(0, 60)],
    "replicas": [interval(0, 60), interval(0, 60)],
    "shards": [interval(0, 23), interval(23, 41), interval(41, 60), interval(60, 60)],
    "rows": [rows(0, 2), rows(2, 6)],
    "columns": [columns(0, 5), columns(5, 10)],
}


@pytest.mark.parametrize("written", CUTS)
@pytest.mark.parametrize("read", CUTS)
def test_any_layout_reads_what_another_kept(tmp_path, written, read):
    for rank, one in enumerate(CUTS[written]):
        Kept(tmp_path, rank, {"model.w": one}).keep({"model.w": one}, INFO)
    for one in CUTS[read]:
        own = Elements(torch.full_like(one.values, -1), one.whole, one.corner, one.part, one.first)
        assert recall(tmp_path, 3, {"model.w": own}) == INFO
        assert torch.equal(own.values, one.values)


def test_missing_elements_are_an_error(tmp_path):
    one = interval(0, 59)
    Kept(tmp_path, 0, {"model.w": one}).keep({"model.w": one}, INFO)
    with pytest.raises(RunError, match=r"lacks elements of model\.w"):
        recall(tmp_path, 3, {"model.w": interval(0, 60)})


def test_ranks_that_begin_again_keep_their_file_and_its_state(tmp_path):
    one = interval(0, 60)
    Kept(tmp_path, 0, {"model.w": one}).keep({"model.w": one}, INFO)
    before = (tmp_path / "rank-00000").stat().st_ino
    Kept(tmp_path, 0, {"model.w": one}, 3)
    assert (tmp_path / "rank-00000").stat().st_ino == before
    own = Elements(torch.zeros(60, dtype=torch.float64), one.whole, one.corner, one.part, one.first)
    recall(tmp_path, 3, {"model.w": own})
    assert torch.equal(own.values, one.values)


def test_a_file_of_other_tensors_is_replaced(tmp_path):
    Kept(tmp_path, 0, {"model.w": interval(0, 60)})
    Kept(tmp_path, 0, {"model.w": interval(0, 30)}, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["rank-00000"]
