"""Checkpoints of a run: written and read by all ranks, keyed by the names of the whole model's parameters.

The keys are ``model.NAME`` for a parameter, and ``optimizer.STATE.NAME`` for what the optimizer keeps of it, such as
``optimizer.exp_avg.NAME``. Nothing is gathered: each rank writes elements that it holds, ranks that hold the same ones
share them out, and each rank reads what it needs, whatever layout wrote it.
"""

import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from pipeloom.checkpoint.checkpoint_folder import (
    FOLDER,
    METADATA,
    TOKENIZER,
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
    run_of,
    write_info,
)
from pipeloom.config import ModelConfig, RunConfig
from pipeloom.data.text import Data
from pipeloom.data.tokenizer import Tokenizer
from pipeloom.errors import PeerLostError, PipeloomError, RunError, UserError
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.runs.run_folder import CONFIG
from pipeloom.training.checkpoints.boxes import Elements
from pipeloom.training.checkpoints.planner import ElementsLoadPlanner, ElementsSavePlanner, differences
from pipeloom.training.checkpoints.storage import CheckpointReader, CheckpointWriter
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.stages import stage_of

MODEL = "model."
"""What keys of parameters begin with."""
_STATE = "optimizer."
"""What keys of the optimizer's state begin with."""
_PATIENCE = timedelta(minutes=30)
"""How long ranks wait for the slowest one to write or read."""
_PASSING: tuple[Cause, ...] = ("clock", "signal")
"""Causes of checkpoints that later ones make superfluous."""
_NEWEST = 2
"""How many of the newest checkpoints stay in any case: if the last one is damaged, the one before may be whole."""

_Found = TypeVar("_Found")


class Checkpoints:
    """Checkpoints of one rank among the others; all ranks make it and call its methods together.

    The optimizer's state has begun. Of the run folders that ranks name, that of rank 0 counts.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        run: Path,
        *,
        tokenizer: Tokenizer,
    ) -> None:
        self._config = config
        self._data_parallel = pipeline.data_parallel
        self._store = pipeline.store
        self._slices = pipeline.slices()
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._rank, self._num_ranks = world.rank, world.size
        self._is_writer = world.rank == 0
        self._tensor_rank = config.layout.coordinates(world.rank).tensor
        # A group of its own: plans and errors are Python objects on the CPU, and writing may take longer than a stall.
        found = dist.new_group(backend="gloo", timeout=_PATIENCE)
        assert isinstance(found, dist.ProcessGroup)
        self._group = found
        # Names from the clock differ between ranks of a launcher; DCP needs one folder.
        paths = [str(run.absolute())]
        dist.broadcast_object_list(paths, 0, group=self._group)
        self._run = Path(paths[0])

    def save(self, info: CheckpointInfo) -> None:
        """Write a checkpoint after a step; when a rank returns, it is there, and no more old ones than are kept.

        Raises:
            RunError: a rank could not write; on all ranks.
            PeerLostError: another rank went away.
        """
        path = self._run / FOLDER / name_of(info.step)
        draft = draft_of(path)
        planner = ElementsSavePlanner(self._held(is_shared_out=True))
        try:
            with _errors(f"cannot write the checkpoint {path}", RunError):
                # Before any rank begins: DCP makes the folder on each rank, which fails if it vanishes in between.
                self._on_all(partial(self._clear, draft))
                dcp.save({}, storage_writer=CheckpointWriter(draft), planner=planner, process_group=self._group)
                files = dict(ChainMap(*self._on_all(partial(self._measure, draft))))
                self._on_all(partial(self._complete, draft, path, info, files))
        finally:
            self._clear(draft)  # of a failure; it would fill the disk

    def restore(self, path: Path) -> CheckpointInfo:
        """Read a complete checkpoint of any layout into the weights' shards and the optimizer.

        Raises:
            UserError: it cannot be read, or is not of this model; names everything that does not fit.
            PeerLostError: another rank went away.
        """
        with _errors(f"cannot read the checkpoint {path}", UserError):
            # Each rank reads its share of the files.
            problems = self._on_all(partial(damage, path, self._rank, self._num_ranks))
            if found := sorted({problem for of_rank in problems for problem in of_rank}):
                lines = [f"the checkpoint {path} is damaged; use another one:", *(f"  - {one}" for one in found)]
                raise UserError("\n".join(lines))
        if read_tokenizer(path) not in (None, self._tokenizer.to_json()):
            raise UserError(
                f"the checkpoint {path} has another tokenizer than this run, so its model reads other tokens; "
                "set data.tokenizer as in the run that wrote it"
            )
        info, reader = read_info(path), CheckpointReader(path)
        # Each rank compares all tensors and not only its own, so that one message names everything that is wrong.
        if differing := differences(expected_shapes(self._config), reader.read_metadata()):
            lines = [f"the checkpoint {path} is not of this model:", *(f"  - {one}" for one in differing)]
            raise UserError("\n".join(lines))
        planner = ElementsLoadPlanner(self._held(is_shared_out=False))
        with _errors(f"cannot read the checkpoint {path}", UserError):
            dcp.load({}, storage_reader=reader, planner=planner, process_group=self._group)
        self._refresh()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                # The optimizer's counter of steps is the run's: not stored for each parameter.
                self._optimizer.state[parameter]["step"].fill_(info.step)
        return info

    def _on_all(self, work: Callable[[], _Found]) -> list[_Found]:
        """What a job returns on each rank, on every rank; where it fails on one, all raise an ``OSError``."""
        problem, own = "", list[_Found]()
        try:
            own.append(work())
        except OSError as error:
            # Sent and not raised here: the other ranks are about to wait for this one in the exchange.
            problem = str(error)
        found: list[tuple[str, list[_Found]]] = [("", [])] * self._num_ranks
        dist.all_gather_object(found, (problem, own), group=self._group)
        for rank, (problem, _) in enumerate(found):
            if problem:
                raise OSError(f"rank {rank}: {problem}")
        return [one for _, result in found for one in result]

    def _clear(self, draft: Path) -> None:
        """On rank 0, remove what a draft left."""
        if self._is_writer:
            shutil.rmtree(draft, ignore_errors=True)

    def _measure(self, draft: Path) -> dict[str, StoredFile]:
        """Sizes and hashes of the files that this rank wrote; rank 0 first writes the tokenizer."""
        names: list[str] = []
        if self._is_writer:
            (draft / TOKENIZER).write_text(self._tokenizer.to_json(), encoding="utf-8")
            names = [METADATA, TOKENIZER]
        # DCP names the files of a rank __RANK_N.distcp. Just written, they are still in this host's page cache.
        return measure([*(draft / name for name in names), *draft.glob(f"__{self._rank}_*")])

    def _complete(self, draft: Path, path: Path, info: CheckpointInfo, files: dict[str, StoredFile]) -> None:
        """On rank 0, give a draft its name, and remove what it makes superfluous."""
        if not self._is_writer:
            return
        write_info(draft, info, files)
        # A rename cannot replace a folder that has files, such as a
        # checkpoint of the same step from a run before.
        _remove(path)
        draft.rename(path)
        keep = self._config.checkpoint.keep
        for old in list_checkpoints(self._run)[: -(_NEWEST if keep is None else keep)]:
            with suppress(OSError, UserError):  # what cannot be removed or read now stays until the next checkpoint
                # Without ``keep`` only those that were due by the clock or a signal.
                if keep is not None or read_info(old).cause in _PASSING:
                    _remove(old)

    def _refresh(self) -> None:
        """Compute with the weights that were read."""
        if self._store is None:
            self._data_parallel.refresh()
            return
        for weights in self._data_parallel.weights.values():  # at rest, as the weights are that the optimizer updates
            whole, wide = self._store.at_rest(weights.whole), self._store.at_rest(weights.shard)
            if whole.data_ptr() != wide.data_ptr():
                # Only where they are two: float32 stages compute on the memory that the optimizer updates.
                whole.copy_(wide)

    def _held(self, *, is_shared_out: bool) -> dict[str, Elements]:
        """This rank's elements of each tensor; of those that other ranks hold too, only its share if shared out."""
        found: dict[str, Elements] = {}
        index, size = self._data_parallel.copy_share if is_shared_out else (0, 1)
        for weights in self._data_parallel.weights.values():
            num = weights.shard.numel()
            # Ranks that hold the same elements write equal parts, so that no rank writes all of them alone.
            low, high = (weights.begin + num * share // size for share in (index, index + 1))
            for prefix, held, begin in self._buffers(weights):
                values = held if self._store is None else self._store.at_rest(held)
                for name, first, start, end in weights.order.overlaps(max(low, begin), min(high, begin + len(values))):
                    part, here = weights.order.shapes[name], self._slices[name]
                    if is_shared_out and self._tensor_rank > 0 and part == here.whole:
                        continue  # all tensor-parallel ranks hold it whole
                    own = values[start - begin : end - begin]
                    found[prefix + name] = Elements(own, here.whole, here.begin, part, first)
        return found

    def _buffers(self, weights: StageWeights) -> Iterator[tuple[str, Tensor, int]]:
        """Flat tensors over a stage's shard: prefix of their keys, the tensor, where it begins in the flat buffer."""
        yield MODEL, weights.shard, weights.begin
        for part in weights.parts:
            for name in self._config.optimizer.rule.state:
                yield _prefix(name), self._optimizer.state[part.parameter][name], part.begin


def checkpoint_info(config: RunConfig, data: Data, step: int, sequences: int, tokens: int) -> CheckpointInfo:
    """Metadata beside the tensors, of a resolved run that has done so many steps and read so much in them."""
    return CheckpointInfo(
        step=step,
        sequences=sequences,
        tokens=tokens,
        model=_sizes(config.model),
        data=_text(config, data),
        layout=asdict(config.layout),
        versions={name: version(name) for name in ("pipeloom", "torch")},
    )


def check_resumable(config: RunConfig) -> None:
    """Refuse the checkpoint of another model or optimizer, before anything starts; it is whole.

    Raises:
        UserError: names everything that does not fit, or why the checkpoint cannot be read.
    """
    path, optimizer = config.checkpoint.resume, config.optimizer
    assert path is not None
    info, sizes = read_info(path), _sizes(config.model)
    problems = [
        f"model.{name} is {sizes.get(name)}, the checkpoint has {info.model.get(name)}"
        for name in sorted({*sizes, *info.model})
        if sizes.get(name) != info.model.get(name)
    ]
    metadata = CheckpointReader(path).read_metadata()
    stored = {key.split(".")[1] for key in metadata.state_dict_metadata if key.startswith(_STATE)}
    if stored != {*optimizer.rule.state}:
        has, wants = (", ".join(sorted(names)) or "nothing" for names in (stored, optimizer.rule.state))
        raise UserError(
            f"the checkpoint {path} is of another optimizer: it keeps {has}, optimizer.name {optimizer.name} "
            f"keeps {wants}; use the optimizer that it is of"
        )
    problems += differences(expected_shapes(config), metadata)
    if not problems:
        return
    run = run_of(path)
    hint = "use the model that it is of"
    if run is not None and (run / CONFIG).exists():
        hint = f"start from its own configuration: pipeloom train {run / CONFIG} --checkpoint.resume {path}"
    raise UserError("\n".join([f"the checkpoint {path} is not of this model:", *(f"  - {p}" for p in problems), hint]))


def new_order(config: RunConfig, data: Data, info: CheckpointInfo) -> list[str]:
    """Settings that make other batches than those with which the run of a checkpoint would have gone on."""
    found = _text(config, data)
    return [name for name in found if found[name] != info.data.get(name)]


def expected_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint of a resolved run, by key."""
    # Every rank can derive this from the configuration, those of other ranks included, without a message.
    model = stage_of(config, range(config.model.num_layers + 2), "meta")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    prefixes = [MODEL, *map(_prefix, config.optimizer.rule.state)]
    return {prefix + name: shape for prefix in prefixes for name, shape in shapes.items()}


def _prefix(name: str) -> str:
    return f"{_STATE}{name}."


def _sizes(model: ModelConfig) -> dict[str, Any]:
    """The model without where its sizes came from."""
    return {name: value for name, value in asdict(model).items() if name not in ("preset", "file")}


def _text(config: RunConfig, data: Data) -> dict[str, Any]:
    return {
        "text": data.corpus_sha256,
        "data.tokenizer": config.data.known_tokenizer,
        "data.seq_len": config.data.seq_len,
        "training.seed": config.training.seed,
    }


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, so that nobody ever sees a part of it under its name."""
    if checkpoint.exists():
        # Renamed first: removing many files takes time, in which a kill
        # would leave half of a checkpoint under its name.
        draft = draft_of(checkpoint).with_suffix(".old")
        shutil.rmtree(draft, ignore_errors=True)
        checkpoint.rename(draft)
        shutil.rmtree(draft)


@contextmanager
def _errors(what: str, kind: type[PipeloomError]) -> Iterator[None]:
    """What went wrong on any rank, as one error on all of them, without the tracebacks that torch puts around it."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise kind(f"{what}: {cause if isinstance(cause, PipeloomError) else f'rank {rank}: {cause}'}") from None
    except OSError as error:
        raise kind(f"{what}: {error}") from None
    # gloo raises a plain RuntimeError when a connection breaks or a wait takes too long.
    except RuntimeError as error:
        raise PeerLostError(f"{what}: a process went away, or did not come in time: {error}") from error
