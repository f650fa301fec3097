"""Planners of checkpoints: what several ranks wrote, others read, cut in another way."""

import dataclasses
import tempfile
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from pipeloom.errors import UserError
from pipeloom.training.checkpoints.boxes import Elements
from pipeloom.training.checkpoints.differences import differences
from pipeloom.training.checkpoints.planner import ElementsLoadPlanner, ElementsSavePlanner, shapes_in


def save(path, ranks):
    """Write the elements of all ranks, as torch.distributed.checkpoint.save would over processes."""
    planners = [ElementsSavePlanner(elements) for elements in ranks]
    writers = [FileSystemWriter(path) for _ in ranks]
    plans = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        planner.set_up_planner({}, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for writer, planner, plan in zip(writers, planners, plans, strict=True)
    ]
    writers[0].finish(metadata, results)


def load(path, elements):
    """Read one rank's elements, as torch.distributed.checkpoint.load would."""
    planner, reader = ElementsLoadPlanner(elements), FileSystemReader(path)
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()


def part_of(whole, dim, rank, num_ranks):
    """Corner and shape of a rank's part of a tensor that is split along a dim; ``None``: all of it."""
    if dim is None:
        return (0,) * len(whole), whole
    size = whole[dim] // num_ranks
    return tuple(rank * size * (d == dim) for d in range(len(whole))), (*whole[:dim], size, *whole[dim + 1 :])


def ranks_of(tensors, cuts, tensor_ranks, dims, *, reads=False):
    """Elements of ranks that share tensors out: first over tensor-parallel ranks, then at cuts.

    Args:
        tensors: by key.
        cuts: for each key, where the flat part of a tensor-parallel rank is cut, for each of the others.
        tensor_ranks: how many.
        dims: for each key, along which dim it is split; ``None``: every rank has all of it.
        reads: whether every rank takes what it has; of what all have, only the first one writes.
    """
    ranks = []
    for tensor_rank in range(tensor_ranks):
        for number in range(len(next(iter(cuts.values()))) + 1):
            held = {}
            for key, tensor in tensors.items():
                corner, part = part_of(tuple(tensor.shape), dims[key], tensor_rank, tensor_ranks)
                own = tensor[tuple(slice(b, b + s) for b, s in zip(corner, part, strict=True))].flatten()
                first, end = [0, *cuts[key], prod(part)][number : number + 2]
                if first < end and (reads or dims[key] is not None or tensor_rank == 0):
                    held[key] = Elements(own[first:end].clone(), tuple(tensor.shape), corner, part, first)
            ranks.append(held)
    return ranks


@st.composite
def sharings(draw, shapes):
    """Any way to share tensors out."""
    tensor_ranks, num = draw(st.sampled_from([1, 2])), draw(st.integers(0, 3))
    dims = {
        key: draw(st.sampled_from([None, *[d for d, size in enumerate(shape) if size % tensor_ranks == 0]]))
        for key, shape in shapes.items()
    }
    parts = {key: prod(part_of(shape, dims[key], 0, tensor_ranks)[1]) for key, shape in shapes.items()}
    cuts = {key: sorted(draw(st.integers(0, parts[key])) for _ in range(num)) for key in shapes}
    return cuts, tensor_ranks, dims


SHAPES = {"model.a": (6, 5), "model.b": (7,), "optimizer.exp_avg.a": (6, 5), "deep": (2, 3, 4)}
TENSORS = {key: torch.arange(prod(shape), dtype=torch.float64).view(shape) for key, shape in SHAPES.items()}
WHOLE = {
    key: Elements(tensor.flatten(), SHAPES[key], (0,) * tensor.ndim, SHAPES[key], 0) for key, tensor in TENSORS.items()
}


@settings(max_examples=60)
@given(sharings(SHAPES), sharings(SHAPES))
def test_what_any_ranks_wrote_any_others_read(writing, reading):
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), ranks_of(TENSORS, *writing))
        for held in ranks_of(TENSORS, *reading, reads=True):
            expected = {key: elements.values.clone() for key, elements in held.items()}
            for elements in held.values():
                elements.values.fill_(torch.nan)
            load(Path(folder), held)
            assert all(torch.equal(held[key].values, expected[key]) for key in expected)


def test_elements_that_nobody_writes_and_elements_that_two_write_are_found_before_anything_is_written(tmp_path):
    few, _ = ranks_of(TENSORS, {key: [3] for key in SHAPES}, 1, dict.fromkeys(SHAPES))
    with pytest.raises(ValueError, match="invalid fill tensor-volume"):
        save(tmp_path / "less", [few, {}])
    late = dataclasses.replace(WHOLE["model.b"], values=WHOLE["model.b"].values[2:], first=2)
    with pytest.raises(ValueError, match=r"key:model\.b has overlapping chunks"):
        save(tmp_path / "more", [WHOLE, {"model.b": late}])
    assert not list(tmp_path.glob("*/*.distcp"))


def test_a_checkpoint_without_some_elements_is_refused(tmp_path):
    few, _ = ranks_of(TENSORS, {key: [3] for key in SHAPES}, 1, dict.fromkeys(SHAPES))
    save(tmp_path, [few])  # a single rank's plan is not checked against the whole
    with pytest.raises(UserError, match=r"not complete: elements of model\.a are missing"):
        load(tmp_path, WHOLE)


def test_everything_that_differs_is_named_at_once(tmp_path):
    save(tmp_path, ranks_of(TENSORS, {key: [] for key in SHAPES}, 1, dict.fromkeys(SHAPES)))
    expected = {"model.a": (5, 6), "model.b": (8,), "deep": (2, 3, 4), "model.c": (1,), "model.d": (1,)}
    assert differences(expected, shapes_in(FileSystemReader(tmp_path).read_metadata())) == [
        "it lacks model.c, model.d",
        "nothing here has the name of optimizer.exp_avg.a",
        "it has another shape for model.a [6, 5] instead of [5, 6], model.b [7] instead of [8]",
    ]


def test_thousands_of_names_are_counted():
    (printed,) = differences({}, {f"model.{n:04}": (2,) for n in range(2000)})
    assert printed.startswith("nothing here has the name of model.0000, model.0001, ")
    assert printed.endswith("model.0004 and 1995 more")


def test_what_is_no_tensor_is_of_another_shape():
    printed = differences({"model.a": (2,)}, shapes_in(Metadata({"model.a": BytesStorageMetadata()})))
    assert printed == ["it has another shape for model.a no tensor instead of [2]"]
