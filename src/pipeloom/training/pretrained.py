"""Weights of a Hugging Face folder as the start of a run: each rank reads the elements that it holds, and no others.

A folder has a ``config.json``, and its weights in ``model.safetensors`` or in several files with an index. No code in
it is executed: other formats of weights are pickles and are refused.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeloom.catalog.architectures import ARCHITECTURES
from pipeloom.catalog.model_files import CONFIG_JSON, POSITIONS, read_model, with_positions
from pipeloom.catalog.weight_files import WeightFiles
from pipeloom.checkpoint.checkpoint_folder import (
    ORIGIN,
    TOKENIZER,
    find_checkpoint,
    is_hugging_face,
    read_info,
    read_origin,
    read_tokenizer,
)
from pipeloom.config import RunConfig
from pipeloom.errors import UserError, reason_of
from pipeloom.model.adapted import adapted_files
from pipeloom.runs.run_folder import WEIGHTS, WEIGHTS_INDEX
from pipeloom.system.files import MOST_RECORD_BYTES, parse_json, read_text
from pipeloom.terminal.words import count
from pipeloom.training.checkpoints.boxes import Box
from pipeloom.training.checkpoints.checkpoint import Checkpoints
from pipeloom.training.checkpoints.contents import check_start, parameter_shapes
from pipeloom.training.checkpoints.differences import differences, listed
from pipeloom.training.stages import stage_of
from pipeloom.workload.adapter import is_pair, without_pairs
from pipeloom.workload.dtypes import Dtype
from pipeloom.workload.model import ModelConfig, model_settings, other_settings

DTYPES: dict[str, Dtype] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of weights by their names in safetensors; others are quantized."""
GENERATION_CONFIG = "generation_config.json"
"""File of a folder with what transformers takes for generation where it is given nothing else."""
END_KEY = "eos_token_id"
"""Key of both files for the tokens that end a text: a number or several."""
TEXTS = (GENERATION_CONFIG,)
"""Text files of a folder that an export of the run writes again, beside its ``config.json`` and its index."""
TOKENIZER_TEXTS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Those that belong to the folder's tokenizer, if the run uses it."""
_ENDING = ".safetensors"
_MOST_FILES = 20
"""Files that a message names."""
_BLOCK = 1 << 24
"""Most elements that are read at once, which bounds the memory of a rank."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        file: its file.
        shape: its shape.
        dtype: its type, as safetensors names it.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Place:
    """Where a parameter is: the tensor's name, the parameter's first index in it, and whether it is transposed."""

    tensor: str
    begin: int
    is_transposed: bool


class PretrainedWeights:
    """The weights of a Hugging Face folder.

    Args:
        folder: its path.
        config: resolved; its model must be that of the folder.

    Attributes:
        folder: its path.
        shapes: of the parameters by name, without adapters, which the folder does not have.
        dtypes: of these parameters.
        most_tokens: of a sequence, as in ``ModelFile``.
        num_files: number of files with weights.

    Raises:
        UserError: the folder cannot be read, or is of another model; lists all differences.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        known = read_model(str(folder), config.data.seq_len, adapts=True)
        assert known.model_type is not None
        self.most_tokens = known.most_tokens
        if differing := other_settings(config.model, model_settings(known.over(config.model)), "there"):
            lines = [f"checkpoint.init {folder} is of another model; set model.file to {folder}:", *differing]
            raise UserError("\n  - ".join(lines))
        stored, num_layers = stored_tensors(folder), config.model.num_layers
        every = parameter_shapes(config)
        self.shapes = shapes = {name: every[name] for name in without_pairs(every)}
        weights = weight_files_of(config.model, known.model_type).named_as_in(stored)
        tensors = weights.of_model(list(shapes), num_layers)
        self._twin = weights.tied if config.model.tied and weights.tied in stored else None
        found = {
            name: one for name, one in stored.items() if name != self._twin and not weights.is_buffer(name, num_layers)
        }
        problems = differences(
            {one.name: one.shape(shapes) for one in tensors}, {name: one.shape for name, one in found.items()}
        )
        problems += [f"{name} has the type {one.dtype}" for name, one in found.items() if one.dtype not in DTYPES][:1]
        if problems:
            what = f"{folder} does not have the weights of its {CONFIG_JSON}:"
            raise UserError("\n  - ".join([what, *problems]))
        self._tied = stage_of(config, range(1), "meta").tied_name
        self._stored = stored
        self._opened: dict[Path, Any] = {}
        self._places: dict[str, _Place] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for tensor in tensors:
            begin = 0
            for name in tensor.parameters:
                self._places[name] = _Place(tensor.name, begin, tensor.is_transposed)
                self.dtypes[name] = getattr(torch, DTYPES[stored[tensor.name].dtype])
                begin += shapes[name][0]
        self.num_files = len({one.file for one in found.values()})

    def read(self, name: str, box: Box, values: Tensor) -> None:
        """Read a box of a parameter; adapters, which the folder does not have, keep their values.

        Args:
            name: of the parameter.
            box: of the whole parameter.
            values: takes the elements, in the shape of the box.

        Raises:
            OSError: a file cannot be read, or has two matrices where the model has one, or NaN or infinite values.
        """
        if is_pair(name):
            return
        place = self._places[name]
        for part, own in _blocks(box, values):
            found = self._elements(place.tensor, place, part)
            own.copy_(found)
            # Before the first step, whose loss would be NaN without naming a cause.
            if not own.isfinite().all():
                stored = self._stored[place.tensor]
                raise OSError(f"{place.tensor} of {stored.file} has values that are NaN or infinite")
            twin = self._twin if name == self._tied else None
            if twin is not None and not torch.equal(self._elements(twin, place, part), found):
                raise OSError(
                    f"{twin} differs from {place.tensor}, but the model is tied; set tie_word_embeddings in "
                    f"its {CONFIG_JSON} to false"
                )

    def whole(self, name: str) -> Tensor:
        """A parameter, in its type in the folder.

        Raises:
            UserError: for what ``read`` raises an ``OSError``.
        """
        shape = self.shapes[name]
        found = torch.empty(shape, dtype=self.dtypes[name])
        try:
            self.read(name, Box((0,) * len(shape), shape), found)
        except OSError as error:
            raise UserError(f"cannot read {self.folder}: {reason_of(error)}") from None
        return found

    def _elements(self, tensor: str, place: _Place, box: Box) -> Tensor:
        rows, *others = (slice(begin, begin + size) for begin, size in zip(*box, strict=True))
        index = (slice(rows.start + place.begin, rows.stop + place.begin), *others)
        file = self._stored[tensor].file
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(file, "pt")
            found = self._opened[file].get_slice(tensor)
            return found[index[::-1]].T if place.is_transposed else found[index]
        except SafetensorError as error:
            raise OSError(f"{tensor} of {file}: {error}") from None


def weight_files_of(model: ModelConfig, model_type: str) -> WeightFiles:
    """The tensors of the weight files of a model of this ``model_type``."""
    return ARCHITECTURES[model_type].weights if model.adapted is None else adapted_files(model.adapted)


def check_init(config: RunConfig) -> str:
    """Refuse a ``checkpoint.init`` that a resolved run cannot start from.

    Returns:
        A description of it.

    Raises:
        UserError: it cannot be read, is damaged, or is of another model; lists all differences.
    """
    path = config.checkpoint.init
    assert path is not None
    if is_hugging_face(path):
        weights = PretrainedWeights(path, config)
        dtypes = sorted({str(one).removeprefix("torch.") for one in weights.dtypes.values()})
        found = f"{path}: {count(weights.num_files, 'file')} of safetensors, {', '.join(dtypes)}"
        return found + _longer(weights, config.data.seq_len)
    check_start(config, path)
    info = read_info(path)
    return f"{path}: step {info.step}, {info.tokens:,} tokens"


def read_weights(weights: Checkpoints, path: Path, config: RunConfig) -> int | None:
    """Set the weights of all ranks to those of a checkpoint or of a Hugging Face folder. Collective.

    Args:
        weights: of this rank.
        path: of the checkpoint or the folder.
        config: resolved.

    Returns:
        The step of the checkpoint; ``None`` for a folder.

    Raises:
        UserError: they cannot be read, or are of another model; raised on all ranks.
    """
    if is_hugging_face(path):
        weights.fill(PretrainedWeights(path, config).read, path)
        return None
    return weights.restore(path).step


def _longer(weights: PretrainedWeights, seq_len: int) -> str:
    """A line if sequences have more tokens than those that the folder's model was trained on; empty otherwise."""
    most = weights.most_tokens
    if most is None or seq_len <= most:
        return ""
    written = with_positions(parse_json(read_text(weights.folder / CONFIG_JSON)), seq_len)[POSITIONS]
    why = ", from which its scaling of positions follows" if written == most else ""
    line = f"its model was trained on {most} positions ({POSITIONS}), sequences have {seq_len}"
    return f"\n           {line}; an export has {written}{why}"


def _blocks(box: Box, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """A box in blocks of rows, each with its part of the values."""
    num_rows = max(1, _BLOCK * box.size[0] // max(1, values.numel()))
    for first, own in zip(range(0, box.size[0], num_rows), values.split(num_rows), strict=True):
        yield Box((box.begin[0] + first, *box.begin[1:]), (len(own), *box.size[1:])), own


@dataclass(frozen=True)
class Origin:
    """The Hugging Face folder that a run started from, so that an export has the same files.

    Attributes:
        texts: its text files by name.
        tensors: for each file of weights its tensors, and their types as safetensors names them.
        about: for each file of weights the metadata of its header.
        uses_tokenizer: whether the run has the folder's tokenizer, so that numbers of tokens in the texts are its own.
            Not stored by earlier versions.
        is_other_tokenizer: whether the folder has a tokenizer and the run another one. Not stored by earlier versions.
    """

    texts: dict[str, str]
    tensors: dict[str, dict[str, str]]
    about: dict[str, dict[str, str]]
    uses_tokenizer: bool = False
    is_other_tokenizer: bool = False


def origin_of(start: Path | None, tokenizer: Mapping[str, str]) -> str | None:
    """The description of the folder that a run's weights come from, as JSON; ``None`` for random weights.

    Args:
        start: what the run starts from: a Hugging Face folder, or a checkpoint, which may have the description.
        tokenizer: files of that of the run.

    Raises:
        UserError: it cannot be read.
    """
    if start is None:
        return None
    own = tokenizer.get(TOKENIZER)
    if not is_hugging_face(start):
        checkpoint = find_checkpoint(start)
        text, theirs = read_origin(checkpoint), read_tokenizer(checkpoint)
        if text is None or theirs is None or theirs.get(TOKENIZER) == own:
            return text
        first = read_description(text)
        changed = replace(
            first,
            texts={name: one for name, one in first.texts.items() if name not in TOKENIZER_TEXTS},
            uses_tokenizer=False,
            is_other_tokenizer=first.uses_tokenizer or first.is_other_tokenizer,
        )
        return json.dumps(asdict(changed), indent=2)
    file = start / TOKENIZER
    is_own = file.is_file() and read_text(file, most_bytes=MOST_RECORD_BYTES) == own
    names = (CONFIG_JSON, WEIGHTS_INDEX, *TEXTS, *(TOKENIZER_TEXTS if is_own else ()))
    texts = {name: read_text(start / name) for name in names if (start / name).is_file()}
    tensors: dict[str, dict[str, str]] = {}
    for name, one in stored_tensors(start).items():
        tensors.setdefault(one.file.name, {})[name] = one.dtype
    about = {name: _about(start / name) for name in tensors}
    is_other = file.is_file() and not is_own
    found = Origin(texts, tensors, about, uses_tokenizer=is_own, is_other_tokenizer=is_other)
    return json.dumps(asdict(found), indent=2)


def read_description(text: str) -> Origin:
    """The inverse of ``origin_of``.

    Raises:
        UserError: the text is no such description.
    """
    # Imported here: most starts read no description, and pydantic takes time to load.
    from pydantic import TypeAdapter, ValidationError

    try:
        found = TypeAdapter(Origin).validate_json(text)
    except ValidationError:
        found = None
    # A checkpoint may be a stranger's: a name with a folder in it could be any file of the host.
    is_plain = found is not None and all(Path(name).name == name for name in (*found.texts, *found.tensors))
    if found is None or not is_plain or CONFIG_JSON not in found.texts or not DTYPES.keys() >= _types(found):
        raise UserError(f"{ORIGIN} of the checkpoint does not describe a Hugging Face folder")
    return found


def _types(origin: Origin) -> set[str]:
    return {kind for part in origin.tensors.values() for kind in part.values()}


def _about(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata() or {}


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder's safetensors files by name.

    Raises:
        UserError: there are none, files cannot be read or are missing, or have other tensors than the index lists.
    """
    index, single = folder / WEIGHTS_INDEX, folder / WEIGHTS
    places: set[tuple[str, str]] | None = None
    if index.is_file():
        places = _index_entries(index)
        files = [index.with_name(name) for name in sorted({name for _, name in places})]
    elif single.is_file():
        files = [single]
    else:
        pickles = sorted(one.name for one in folder.glob("*.bin"))
        hint = f", only {', '.join(pickles)}: pickles, which can run code; convert them" if pickles else ""
        raise UserError(f"expected {WEIGHTS} or {WEIGHTS_INDEX} in {folder}, found neither{hint}")
    found: dict[str, StoredTensor] = {}
    entries, unread = set[tuple[str, str]](), dict[Path, str]()
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  not a mapping
                    one = opened.get_slice(name)
                    found[name] = StoredTensor(file, tuple(one.get_shape()), one.get_dtype())
                    entries.add((name, file.name))
        except SafetensorError as error:
            unread[file] = f"it is damaged or not complete ({reason_of(error)})"
        except OSError as error:
            unread[file] = "there is no such file" if not file.exists() else reason_of(error)
    if unread:
        raise UserError(_all_unread(unread))
    if places is not None and places != entries:
        # A loader that follows the index would leave out what it does not list.
        sorts = {"the files lack": places - entries, "it does not list": entries - places}
        problems = [
            f"{sort} {listed([f'{name} in {file}' for name, file in sorted(wrong)])}"
            for sort, wrong in sorts.items()
            if wrong
        ]
        raise UserError("\n  - ".join([f"{index} does not list the tensors of its files:", *problems]))
    return found


def _all_unread(unread: Mapping[Path, str]) -> str:
    """The message about files of weights that cannot be read, each with the reason; of many the first ones."""
    problems = [f"cannot read the weights {file}: {reason}" for file, reason in unread.items()]
    more = len(problems) - _MOST_FILES
    problems[_MOST_FILES:] = [f"and {more} more"] if more > 0 else []
    return "\n  - ".join(problems) + f"; download or copy {'it' if len(unread) == 1 else 'them'} again"


def _index_entries(index: Path) -> set[tuple[str, str]]:
    """The tensors that an index lists, each with its file, which is in the folder of the index."""
    text = read_text(index)
    try:
        tree = parse_json(text)
    except UserError as error:
        raise UserError(f"cannot read {index}: {error}") from None
    places = tree.get("weight_map") if isinstance(tree, dict) else None
    entries = {(str(name), str(file)) for name, file in places.items()} if isinstance(places, dict) else set()
    # A name with a folder in it could be any file of the host.
    if not entries or any(Path(name).name != name or not name.endswith(_ENDING) for _, name in entries):
        raise UserError(f"cannot read {index}: expected a weight_map from tensors to *{_ENDING} files of its folder")
    return entries
