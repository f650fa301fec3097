"""Distributed checkpoints, written and read by all ranks, independent of the layout.

Keys are ``model.NAME`` for a parameter, and ``optimizer.STATE.NAME`` for its optimizer state, such as
``optimizer.exp_avg.NAME``; ``NAME`` is the name in the whole model. Nothing is gathered: each rank writes the elements
that it holds (ranks with equal elements write a share each) and reads those that it needs, whatever layout wrote them.
"""

import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.checkpoint.checkpoint_folder import (
    FOLDER,
    METADATA,
    ORIGIN,
    Cause,
    CheckpointInfo,
    StoredFile,
    damage,
    draft_of,
    list_checkpoints,
    measure,
    name_of,
    read_info,
    read_tokenizer,
    step_of,
    sync_folder,
    write_info,
    write_synced,
)
from pipeloom.config import RunConfig
from pipeloom.data.tokenizer import Tokenizer
from pipeloom.errors import RunError, UserError
from pipeloom.execute.parts.data_parallel import Segment as HeldAlike
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.flat_order import FlatOrder
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.model.experts import biases_of, is_bias
from pipeloom.system.host_memory import available_memory
from pipeloom.training.background import Background
from pipeloom.training.checkpoints.boxes import Box, Elements, Segment, share_of
from pipeloom.training.checkpoints.contents import (
    MODEL,
    OUTER,
    expected_shapes,
    state_prefix,
    stored_shapes,
    weights_only,
)
from pipeloom.training.checkpoints.differences import differences
from pipeloom.training.checkpoints.failures import failures_as
from pipeloom.training.checkpoints.kept import Kept, recall
from pipeloom.training.memory_check import processes_here
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.records.noted import NOT_NOTED, CheckpointActivities

_PATIENCE = timedelta(minutes=30)
"""Longest time that ranks wait for the slowest one to write or read."""
_PASSING: tuple[Cause, ...] = ("clock", "signal")
"""Causes of checkpoints that are removed once newer ones exist."""
_MOST_OF_MEMORY = 0.5
"""Part of a host's available memory that the copies of its processes may take."""
_NEWEST = 2
"""Number of newest checkpoints that always stay, in case the last one is damaged."""

_Found = TypeVar("_Found")


class Checkpoints:
    """Writes and reads checkpoints. Construction and all methods are collective.

    The optimizer's state must exist; without an optimizer only weights are read. All ranks use rank 0's run folder.

    Attributes:
        removes_old: whether a checkpoint that is written replaces older ones, as far as ``checkpoint.keep`` states it.
    """

    removes_old = True

    def __init__(
        self,
        config: RunConfig,
        world: World,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        run: Path,
        *,
        tokenizer: Tokenizer,
        origin: str | None = None,
        noted: CheckpointActivities = NOT_NOTED,
    ) -> None:
        self._config = config
        self._data_parallel = pipeline.data_parallel
        self._store, self._is_first_replica = pipeline.store, pipeline.is_first_replica
        self._slices = pipeline.slices()
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._origin = origin
        self._noted = noted
        self._rank, self._num_ranks = world.rank, world.size
        self._is_writer = world.rank == 0
        place = config.layout.coordinates(world.rank)
        self._tensor_rank = place.tensor
        self._replica = None if config.layout.average_every is None else config.layout.replica_of(place)
        # A group of its own: DCP exchanges Python objects, and writing may exceed the stall timeout.
        found = dist.new_group(backend="gloo", timeout=_PATIENCE)
        assert isinstance(found, dist.ProcessGroup)
        self._group = found
        # Ranks of a launcher may have chosen different names from the clock; DCP needs one folder.
        paths = [str(run.absolute())]
        dist.broadcast_object_list(paths, 0, group=self._group)
        self._run = Path(paths[0])
        self._background = Background("checkpoint")
        self._copies: dict[str, Tensor] = {}
        self._kept: Kept | None = None
        self._device = world.device

    def save(self, info: CheckpointInfo) -> None:
        """Write a checkpoint after a step, then remove old ones. It is complete when any rank returns.

        ``ended`` must have returned the result of an earlier ``begin``.

        Raises:
            RunError: a rank could not write; raised on all ranks.
            PeerLostError: another rank exited or does not answer.
        """
        with self._noted.together:
            self._write(info, self._held(is_shared_out=True))

    def begin(self, info: CheckpointInfo) -> bool:
        """Copy what this rank writes to host memory, and write the copy in a thread while training continues.

        ``ended`` must have returned the result of an earlier ``begin``.

        Returns:
            Whether a thread writes the checkpoint. If the copies do not fit into the memory of a host, the checkpoint
            was written before the return, as by ``save``, which also raises the same errors.
        """
        held = self._held(is_shared_out=True)
        with failures_as(f"cannot write the checkpoint of step {info.step}", RunError):
            # All ranks do the same: in a step, a rank that trains would run into its timeout for one that writes.
            fits = all(self._on_all(partial(self._has_room, held)))
        if not fits:
            with self._noted.together:
                self._write(info, held)
            return False
        is_cuda = self._device.type == "cuda"
        for key, one in held.items():
            if key not in self._copies:
                self._copies[key] = torch.empty(len(one.values), dtype=one.values.dtype, pin_memory=is_cuda)
            self._copies[key].copy_(one.values, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize(self._device)
        copied = {key: replace(one, values=self._copies[key]) for key, one in held.items()}
        self._background.begin(partial(self._write_behind, info, copied))
        return True

    def _write_behind(self, info: CheckpointInfo, held: dict[str, Elements]) -> None:
        with self._noted.behind:
            self._write(info, held)

    def ended(self, *, waits: bool) -> float | None:
        """Seconds that the thread wrote for; ``None`` if it has not ended and ``waits`` is false, or none was begun.

        Raises:
            RunError: as ``save``; ``PeerLostError`` likewise.
        """
        with self._noted.wait:
            return self._background.end(waits=waits)

    def _has_room(self, held: dict[str, Elements]) -> bool:
        """Whether the copies are allocated, or the processes of this host have memory for them."""
        needed = sum(one.values.numel() * one.values.element_size() for one in held.values())
        return bool(self._copies) or (
            needed * processes_here(self._config).total() <= _MOST_OF_MEMORY * available_memory().size_bytes
        )

    def _write(self, info: CheckpointInfo, held: dict[str, Elements]) -> None:
        """Write these elements of this rank, and complete the checkpoint."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread starts with device 0
        path = self._run / FOLDER / name_of(info.step)
        draft = draft_of(path)
        # Not before the first checkpoint: it would delay the first step.
        import torch.distributed.checkpoint as dcp

        from pipeloom.training.checkpoints.planner import ElementsSavePlanner
        from pipeloom.training.checkpoints.storage import CheckpointWriter

        planner = ElementsSavePlanner(held)
        try:
            with failures_as(f"cannot write the checkpoint {path}", RunError):
                # Before any rank begins: DCP creates the folder on each rank, and fails if it is removed meanwhile.
                self._on_all(partial(self._clear, draft))
                writer = CheckpointWriter(draft, self._noted.files)
                dcp.save({}, storage_writer=writer, planner=planner, process_group=self._group)
                files = dict(ChainMap(*self._on_all(partial(self._measure, draft))))
                self._on_all(partial(self._complete, draft, path, info, files))
        finally:
            self._clear(draft)  # left by a failure; it would fill the disk

    def restore(self, path: Path) -> CheckpointInfo:
        """Read a complete checkpoint of any layout into this layout's weight shards and optimizer state.

        Raises:
            UserError: it cannot be read, or is of another model; lists all differences.
            PeerLostError: another rank exited or does not answer.
        """
        with failures_as(f"cannot read the checkpoint {path}", UserError):
            # Each rank reads its share of the files.
            problems = self._on_all(partial(damage, path, self._rank, self._num_ranks))
            if found := sorted({problem for of_rank in problems for problem in of_rank}):
                lines = [f"the checkpoint {path} is damaged; use another one:", *(f"  - {one}" for one in found)]
                raise UserError("\n".join(lines))
        if read_tokenizer(path) not in (None, self._tokenizer.files()):
            raise UserError(
                f"the checkpoint {path} has another tokenizer than this run, so its model reads other tokens; "
                "set data.tokenizer as in the run that wrote it"
            )
        info = read_info(path)
        # Each rank compares all tensors, not only its own, so that one message lists all differences.
        if self._optimizer is None:
            expected, stored = weights_only(self._config, path)
        else:
            expected, stored = expected_shapes(self._config), stored_shapes(path)
        if differing := differences(expected, stored):
            lines = [f"the checkpoint {path} is not of this model:", *(f"  - {one}" for one in differing)]
            raise UserError("\n".join(lines))
        held = self._held(is_shared_out=False)
        import torch.distributed.checkpoint as dcp

        from pipeloom.training.checkpoints.planner import ElementsLoadPlanner
        from pipeloom.training.checkpoints.storage import CheckpointReader

        planner = ElementsLoadPlanner({key: held[key] for key in held if key in expected})
        with failures_as(f"cannot read the checkpoint {path}", UserError):
            dcp.load({}, storage_reader=CheckpointReader(path), planner=planner, process_group=self._group)
        self._adopt(info)
        return info

    def _adopt(self, info: CheckpointInfo) -> None:
        """Compute with the state that was read."""
        self._refresh()
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                # The step counter is the same for all parameters, so it is not stored for each.
                state["step"].fill_(info.step * self._config.layout.updates_by_replica[self._replica or 0])

    def prepare_kept(self, folder: Path, step: int) -> None:
        """Take shared memory for the states of this rank; before the first checkpoint, whose thread uses the group.

        Args:
            folder: of the files of all ranks.
            step: that the run resumes from.

        Raises:
            RunError: there is no room; raised on all ranks.
            PeerLostError: another rank exited or does not answer.
        """

        def make() -> None:
            self._kept = Kept(folder, self._rank, self._held(is_shared_out=False), step)

        with failures_as("cannot keep states in shared memory (restart.times)", RunError):
            self._on_all(make)

    def keep(self, info: CheckpointInfo) -> None:
        """Copy this rank's state to shared memory; no communication."""
        assert self._kept is not None, "no memory was prepared"
        self._kept.keep(self._held(is_shared_out=False), info)

    def forget_kept(self, step: int) -> None:
        """Drop this rank's states of later steps from shared memory, if it keeps any."""
        if self._kept is not None:
            self._kept.forget_after(step)

    def recall(self, folder: Path, step: int) -> CheckpointInfo:
        """Read the state of a step from shared memory, written by ranks of any layout.

        Raises:
            RunError: it cannot be read; raised on all ranks.
            PeerLostError: another rank exited or does not answer.
        """
        held = self._held(is_shared_out=False)
        with failures_as(f"cannot read the state of step {step} from shared memory", RunError):
            info = self._on_all(partial(recall, folder, step, held))[0]
        self._adopt(info)
        return info

    def fill(self, read: Callable[[str, Box, Tensor], None], source: Path) -> None:
        """Set the weights to values from elsewhere.

        Args:
            read: (parameter, box of the whole parameter, view) -> ``None``; writes the elements of the box into the
                view. Called for each box that this rank holds; raises an ``OSError`` if it cannot.
            source: for messages.

        Raises:
            UserError: a rank could not read; raised on all ranks.
            PeerLostError: another rank exited or does not answer.
        """

        def fill_all() -> None:
            for key, held in self._held(is_shared_out=False).items():
                if key.startswith(MODEL) and not is_bias(key):
                    for box, view in held.boxes():
                        read(key.removeprefix(MODEL), box, view)

        with failures_as(f"cannot read {source}", UserError):
            self._on_all(fill_all)
        self._refresh()

    def _on_all(self, work: Callable[[], _Found]) -> list[_Found]:
        """Call ``work`` on every rank; returns the results of all ranks. If one fails, all raise ``OSError``."""
        problem, own = "", list[_Found]()
        try:
            own.append(work())
        except OSError as error:
            # Not raised here: the other ranks wait for this one in the exchange below.
            problem = str(error)
        found: list[tuple[str, list[_Found]]] = [("", [])] * self._num_ranks
        with self._noted.agreement:
            dist.all_gather_object(found, (problem, own), group=self._group)
        for rank, (problem, _) in enumerate(found):
            if problem:
                raise OSError(f"rank {rank}: {problem}")
        return [one for _, result in found for one in result]

    def _clear(self, draft: Path) -> None:
        """Remove a draft folder, on rank 0."""
        if self._is_writer:
            shutil.rmtree(draft, ignore_errors=True)

    def _measure(self, draft: Path) -> dict[str, StoredFile]:
        """Sizes and hashes of the files that this rank wrote; rank 0 first writes the texts."""
        names: list[str] = []
        if self._is_writer:
            texts = self._tokenizer.files()
            if self._origin is not None:
                texts[ORIGIN] = self._origin
            for name, text in texts.items():
                write_synced(draft / name, text)
            names = [METADATA, *texts]
        # DCP names the files of a rank __RANK_N.distcp. They are still in this host's page cache, so hashing is fast.
        return measure([*(draft / name for name in names), *draft.glob(f"__{self._rank}_*")])

    def _complete(self, draft: Path, path: Path, info: CheckpointInfo, files: dict[str, StoredFile]) -> None:
        """On rank 0, rename a draft to its final name, and remove older checkpoints."""
        if not self._is_writer:
            return
        # Hosts with separate file systems would leave a checkpoint that lacks the other hosts' files.
        if missing := sorted(name for name in files if not (draft / name).is_file()):
            raise OSError(
                f"{', '.join(missing)} of other ranks are not in {draft.parent}; "
                "set output.folder to a folder that all hosts share"
            )
        write_info(draft, info, files)
        # Tensors and description were synced when they were written; their names belong to the folder.
        sync_folder(draft)
        # A rename cannot replace a folder with files, such as an earlier checkpoint of the same step.
        _remove(path)
        draft.rename(path)
        # Before older ones are removed: a crash could otherwise lose the new name and the old checkpoints.
        sync_folder(path.parent)
        if not self.removes_old:
            return
        keep, every = self._config.checkpoint.keep, self._config.checkpoint.keep_every
        for old in list_checkpoints(self._run)[: -(_NEWEST if keep is None else keep)]:
            if every is not None and (step_of(old) or 0) % every == 0:
                continue
            with suppress(OSError, UserError):  # one that cannot be removed or read now is tried again next time
                # Without ``keep``, only those caused by the clock or a signal.
                if keep is not None or read_info(old).cause in _PASSING:
                    _remove(old)

    def _refresh(self) -> None:
        """Update the weights that stages compute with from those that were read."""
        self._data_parallel.refresh()
        for weights, _ in self._data_parallel.segments():
            if self._store is None or not weights.is_swapped or not weights.order.size:
                continue  # stages without trained weights compute on what was read
            whole, wide = self._store.at_rest(weights.whole), self._store.at_rest(weights.shard)
            if whole.data_ptr() != wide.data_ptr():
                # float32 stages compute on the very memory that the optimizer updates, and need no copy.
                whole.copy_(wide)

    def _held(self, *, is_shared_out: bool) -> dict[str, Elements]:
        """This rank's elements by key; with ``is_shared_out``, only its share of those that other ranks hold too."""
        found: dict[str, Elements] = {}
        for alike in self._data_parallel.segments():
            weights = alike.weights
            for segment in self._segments(alike):
                own = share_of(segment.begin, segment.size, segment.among if is_shared_out else (0, 1))
                for prefix, held, begin in segment.buffers:
                    buffer = prefix, self._at_rest(held), begin
                    found |= self._elements(segment.order, buffer, own, is_shared_out=is_shared_out)
            if not is_shared_out or self._is_first:
                for name, bias in biases_of(weights.module).items():
                    found[MODEL + name] = Elements(bias, tuple(bias.shape), (0,), tuple(bias.shape), 0)
            if not is_shared_out or alike.copy_share[0] == 0 or self._replica is not None:
                for key, held in self._of_matrices(weights):
                    shape = tuple(held.shape)
                    found[key] = Elements(self._at_rest(held).view(-1), shape, (0,) * len(shape), shape, 0)
        return found

    @property
    def _is_first(self) -> bool:
        """Whether this rank writes what all ranks of its stages hold."""
        return self._tensor_rank == 0 and self._is_first_replica

    def _at_rest(self, held: Tensor) -> Tensor:
        return held if self._store is None else self._store.at_rest(held)

    def _segments(self, alike: HeldAlike) -> Iterator[Segment]:
        """The trained and the frozen ones of parameters that the same ranks hold, as far as there are some."""
        weights, copies = alike.weights, alike.copy_share
        if weights.order.size:
            whole = weights.order, weights.begin, weights.shard.numel()
            yield Segment(*whole, copies, list(self._buffers(weights)))
            # Replicas that step alone have moments of their own.
            yield Segment(*whole, copies if self._replica is None else (0, 1), list(self._moments(weights)))
        if (frozen := weights.frozen) is not None:
            # Without full sharding every replica holds all of them.
            among = copies if frozen.is_sharded else alike.replica_share
            buffers = [(MODEL, frozen.shard, frozen.begin)]
            yield Segment(frozen.order, frozen.begin, frozen.shard.numel(), among, buffers)

    def _elements(
        self, order: FlatOrder, buffer: tuple[str, Tensor, int], own: range, *, is_shared_out: bool
    ) -> dict[str, Elements]:
        """The elements of a flat tensor, by key.

        Args:
            order: of the parameters in the stage's buffer.
            buffer: prefix of the keys, the tensor, and the index of its first element in the stage's buffer.
            own: indices in the stage's buffer that count.
            is_shared_out: whether only the first tensor-parallel rank has what all of them hold.
        """
        prefix, values, begin = buffer
        found: dict[str, Elements] = {}
        for name, first, start, end in order.overlaps(max(own.start, begin), min(own.stop, begin + len(values))):
            part, here = order.shapes[name], self._slices[name]
            if is_shared_out and self._tensor_rank > 0 and part == here.whole:
                continue
            found[prefix + name] = Elements(values[start - begin : end - begin], here.whole, here.begin, part, first)
        return found

    def _buffers(self, weights: StageWeights) -> Iterator[tuple[str, Tensor, int]]:
        """Flat tensors of a stage's shard: prefix of their keys, tensor, index of its first element in the stage."""
        yield MODEL, weights.shard, weights.begin
        if weights.outer_momentum is not None:
            yield state_prefix(OUTER), weights.outer_momentum, weights.begin

    def _moments(self, weights: StageWeights) -> Iterator[tuple[str, Tensor, int]]:
        """As ``_buffers``, the optimizer's state."""
        if self._optimizer is None:
            return
        for part in weights.parts:
            if part.name is None:
                for name in self._config.optimizer.rule.state:
                    yield (
                        state_prefix(name, self._replica or 0),
                        self._optimizer.state[part.parameter][name],
                        part.begin,
                    )

    def _of_matrices(self, weights: StageWeights) -> Iterator[tuple[str, Tensor]]:
        """State of the parameters that the optimizer updates as whole matrices, by key, in the shape that it has."""
        if self._optimizer is None:
            return
        for part in weights.parts:
            if part.name is not None:
                for name in self._config.optimizer.rule.state_shapes(part.name, tuple(part.parameter.shape)):
                    yield (
                        state_prefix(name, self._replica or 0) + part.name,
                        self._optimizer.state[part.parameter][name],
                    )


def _remove(checkpoint: Path) -> None:
    if checkpoint.is_symlink():
        checkpoint.unlink()  # what it refers to is not this run's
    elif checkpoint.exists():
        # Renamed first: a kill during the removal would otherwise leave part of a checkpoint under its name.
        draft = draft_of(checkpoint).with_suffix(".old")
        shutil.rmtree(draft, ignore_errors=True)
        checkpoint.rename(draft)
        shutil.rmtree(draft)
