"""What an export of a checkpoint consists of: pipeloom's parameters, a Hugging Face folder, or one of PEFT."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from pipeloom.catalog.model_files import CONFIG_JSON, config_json, with_positions
from pipeloom.catalog.weight_files import FileTensor
from pipeloom.checkpoint.checkpoint_folder import read_info, read_origin, read_tokenizer
from pipeloom.config import ModelConfig
from pipeloom.config.resumed import model_in
from pipeloom.data.tokenizer import tokenizer_from
from pipeloom.errors import UserError
from pipeloom.model.experts import is_bias
from pipeloom.runs.run_folder import ADAPTER_WEIGHTS, WEIGHTS_INDEX
from pipeloom.system.files import parse_json
from pipeloom.training.pretrained import DTYPES, END_KEY, GENERATION_CONFIG, Origin, read_description, weight_files_of
from pipeloom.workload.adapter import FIRST, PAIR, PATHS, SECOND, Adapter, is_pair, without_pairs
from pipeloom.workload.dtypes import Dtype
from pipeloom.workload.sharing import layer_names, shared_name

_DTYPE_KEY, _OLD_DTYPE_KEY = "dtype", "torch_dtype"
"""Key of a ``config.json`` for the type of its weights, in transformers 5 and 4."""
PEFT_CONFIG = "adapter_config.json"
"""Settings of adapters in a folder of PEFT."""
_PEFT_PREFIX = "base_model.model."
"""Beginning of PEFT's names, before those of the model's modules."""


@dataclass(frozen=True)
class Content:
    """What an export consists of.

    Attributes:
        tensors: of the files of weights.
        dtypes: of the tensors by name.
        parts: names of tensors by file; empty to divide them by size.
        headers: for each file its header's metadata, where it is not ``about``.
        about: metadata of headers and index.
        texts: text files by name, without the tokenizer.
    """

    tensors: list[FileTensor]
    dtypes: Mapping[str, torch.dtype]
    parts: Mapping[str, list[str]] = field(default_factory=dict)
    headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    texts: Mapping[str, str] = field(default_factory=dict)


def stored_adapter(checkpoint: Path) -> Adapter | None:
    """The adapters of a checkpoint's weights; ``None`` for none.

    Raises:
        UserError: it cannot be read.
    """
    found = read_info(checkpoint).adapter
    if found is None:
        return None
    try:
        return TypeAdapter(Adapter).validate_python(found)
    except ValidationError as error:
        raise UserError(f"cannot read the adapters of {checkpoint}: {error.errors()[0]['msg']}") from None


def own_content(checkpoint: Path, dtypes: Mapping[str, torch.dtype]) -> Content:
    """The parameters with their own names."""
    info = read_info(checkpoint)
    about = {"format": "pt", "step": str(info.step), "model": json.dumps(info.model)}
    if any(map(is_pair, dtypes)):
        about["adapter"] = json.dumps(info.adapter)
    return Content([FileTensor(name, (name,)) for name in dtypes], dtypes, about=about)


def hugging_face_content(
    checkpoint: Path, stated: Mapping[str, torch.dtype], dtype: Dtype | None, file_bytes: int | None
) -> Content:
    """The content of a Hugging Face folder; that of the folder that the run started from, with other values."""
    model, first, table = _model_of(checkpoint)
    if any(map(is_bias, stated)):
        raise UserError(
            f"the checkpoint {checkpoint} has biases of experts (model.balance bias), for which files of "
            f"{table['model_type']} models have no place; export it without --format hf"
        )
    files = weight_files_of(model, table["model_type"])
    if first is not None:
        files = files.named_as_in([name for part in first.tensors.values() for name in part])
    names = [name for one in stated for name in layer_names(one, model.sharing)]
    tensors = [_of_shared(one, model) for one in files.of_model(names, model.num_layers)]
    theirs = {} if first is None else {name: kind for part in first.tensors.values() for name, kind in part.items()}
    dtypes = {
        one.name: getattr(torch, DTYPES[theirs[one.name]]) if one.name in theirs else stated[one.parameters[0]]
        for one in tensors
    }
    texts = {} if first is None else dict(first.texts)
    written = str(dtype or next(iter(dtypes.values()))).removeprefix("torch.")
    is_other = dtype is not None and table.get(_DTYPE_KEY, table.get(_OLD_DTYPE_KEY)) != dtype
    if first is None or is_other or table != _config_of(first):
        key = _OLD_DTYPE_KEY if _OLD_DTYPE_KEY in table else _DTYPE_KEY
        own = {key: written} if first is None or is_other else {}
        texts[CONFIG_JSON] = json.dumps({**table, **own}, indent=2, sort_keys=True) + "\n"
    if first is None or dtype is not None or file_bytes is not None:
        texts.pop(WEIGHTS_INDEX, None)
        return Content(tensors, dtypes, texts=texts)
    names = {one.name for one in tensors}
    parts = {file: [name for name in part if name in names] for file, part in first.tensors.items()}
    return Content(tensors, dtypes, parts, first.about, texts=texts)


def _of_shared(tensor: FileTensor, model: ModelConfig) -> FileTensor:
    """A tensor of a layer's own in a file, from the parameters that the layer shares."""
    if model.sharing is None:
        return tensor
    return replace(tensor, parameters=tuple(shared_name(name, model.sharing) for name in tensor.parameters))


def _model_of(checkpoint: Path) -> tuple[ModelConfig, Origin | None, dict[str, Any]]:
    """The model of a checkpoint, the folder that its run started from, and the ``config.json``."""
    info = read_info(checkpoint)
    seq_len = info.data["data.seq_len"]
    # Files of Hugging Face have dense matrices.
    model = model_in(checkpoint).dense
    text = read_origin(checkpoint)
    first = None if text is None else read_description(text)
    if first is None:
        return model, None, _with_special_tokens(config_json(model, seq_len), checkpoint)
    # Programs that read the file cut sequences at its number of positions: it has those that were trained.
    table = with_positions(_config_of(first), seq_len)
    if not first.is_other_tokenizer:
        return model, first, table
    # The folder's numbers mean other tokens.
    texts = dict(first.texts)
    if isinstance(generation := parse_json(texts.get(GENERATION_CONFIG, "null")), dict):
        texts[GENERATION_CONFIG] = json.dumps(_with_special_tokens(generation, checkpoint), indent=2) + "\n"
    return model, replace(first, texts=texts), _with_special_tokens(table, checkpoint)


def _with_special_tokens(table: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """A ``config.json`` with the tokens that begin and end a text of the checkpoint's tokenizer.

    Programs take numbers that are left out from the defaults of the architecture, which are those of other tokenizers.
    """
    files = read_tokenizer(checkpoint)
    if files is None:
        return table
    tokenizer, ends = tokenizer_from(files), table.get(END_KEY)
    if tokenizer.end_of_text in (ends if isinstance(ends, list) else [ends]):
        return table
    begin = tokenizer.begin_of_text
    return {
        **table,
        "bos_token_id": begin[0] if begin else None,
        END_KEY: tokenizer.end_of_text,
        "pad_token_id": None,
    }


def _config_of(first: Origin) -> dict[str, Any]:
    found = parse_json(first.texts[CONFIG_JSON])
    if not isinstance(found, dict):
        raise UserError(f"{CONFIG_JSON} of the folder that the run started from must be an object, found {found!r:.60}")
    return found


def peft_content(checkpoint: Path, adapter: Adapter, stated: Mapping[str, torch.dtype]) -> Content:
    """The adapters alone, as a folder that ``PeftModel.from_pretrained`` loads.

    Args:
        checkpoint: its folder.
        adapter: its adapters.
        stated: types of its parameters by name.

    Raises:
        UserError: a tensor of the architecture joins several matrices, or has its inputs first: PEFT then adapts it as
            one matrix.
    """
    model, _, table = _model_of(checkpoint)
    files = weight_files_of(model, table["model_type"]).of_model(without_pairs(stated), model.num_layers)
    module_of = {one.parameters: one for one in files}
    tensors, targets = list[FileTensor](), list[str]()
    for layer in range(adapter.first_layer, model.num_layers):
        for target in adapter.targets:
            matrix = f"layers.{layer}.{PATHS[target]}"
            theirs = module_of.get((f"{matrix}.weight",))
            if theirs is None or theirs.is_transposed:
                raise UserError(
                    f"PEFT cannot have these adapters: in files of {table['model_type']} models the matrix of target "
                    f"{target} is joined with others or transposed; export the merged weights with --merge"
                )
            module = theirs.name.removesuffix(".weight")
            targets.append(module.rpartition(".")[2])
            tensors += [
                FileTensor(f"{_PEFT_PREFIX}{module}{ending.removeprefix(f'.{PAIR}')}", (matrix + ending,))
                for ending in (FIRST, SECOND)
            ]
    some = list(range(adapter.first_layer, model.num_layers)) if adapter.first_layer else None
    settings = {
        "base_model_name_or_path": read_info(checkpoint).base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None if some is None else "layers",
        "layers_to_transform": some,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "target_modules": list(dict.fromkeys(targets)),
        "task_type": "CAUSAL_LM",
    }
    dtypes = {one.name: stated[one.parameters[0]] for one in tensors}
    texts = {PEFT_CONFIG: json.dumps(settings, indent=2) + "\n"}
    return Content(tensors, dtypes, {ADAPTER_WEIGHTS: [one.name for one in tensors]}, texts=texts)
