"""What a checkpoint of a run contains: description, tensors and their shapes; and what does not fit a run."""

from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from pipeloom.checkpoint.checkpoint_folder import CheckpointInfo, is_hugging_face, read_info, run_of
from pipeloom.config import RunConfig
from pipeloom.data.text import Data
from pipeloom.errors import UserError
from pipeloom.model.experts import BIAS, balances_of, is_bias
from pipeloom.runs.run_folder import CONFIG
from pipeloom.terminal.words import count, quoted
from pipeloom.training.checkpoints.differences import Shapes, differences
from pipeloom.training.stages import stage_of
from pipeloom.workload.adapter import Adapter, is_pair, without_pairs
from pipeloom.workload.layout import Layout
from pipeloom.workload.model import model_settings, other_settings

MODEL = "model."
"""Prefix of the keys of parameters."""
STATE = "optimizer."
"""Prefix of the keys of optimizer state."""
OUTER = "outer_momentum"
"""State of the outer step, where replicas step alone and average their weights."""
HELD_OUT = "data.validation_fraction"
"""Setting that divides the text into training and validation."""
_PACK = "data.pack"


def checkpoint_info(config: RunConfig, data: Data | None, step: int, sequences: int, tokens: int) -> CheckpointInfo:
    """Description of a checkpoint of a resolved run after so many steps, sequences and tokens; without data of none."""
    init = config.checkpoint.init
    return CheckpointInfo(
        step=step,
        sequences=sequences,
        tokens=tokens,
        model=model_settings(config.model),
        data=_text(config, data),
        layout=asdict(config.layout),
        versions={name: version(name) for name in ("pipeloom", "torch")},
        adapter=None if config.pairs is None else asdict(config.pairs),
        base=None if init is None or not is_hugging_face(init) else str(init),
    )


def check_resumable(config: RunConfig) -> None:
    """Refuse ``checkpoint.resume``, which is complete, if it is of another model or optimizer.

    Raises:
        UserError: lists all differences, or why the checkpoint cannot be read.
    """
    path, optimizer = config.checkpoint.resume, config.optimizer
    assert path is not None
    _refuse_other_replicas(config, path)
    shapes, expected = stored_shapes(path), expected_shapes(config)
    stored = {key.split(".")[1] for key in shapes if key.startswith(STATE)}
    wanted = {key.split(".")[1] for key in expected if key.startswith(STATE)}
    if stored != wanted:
        has, wants = (", ".join(sorted(names)) or "nothing" for names in (stored, wanted))
        raise UserError(
            f"the checkpoint {path} is of another optimizer: its state is {has}, that of optimizer.name "
            f"{optimizer.name} is {wants}; use the optimizer that wrote it, or start from its weights alone with "
            "--checkpoint.init instead of --checkpoint.resume"
        )
    of_checkpoint, of_run = (_trained(keys) for keys in (shapes, expected))
    # A larger model has the parameters of a smaller one, too.
    is_model = not other_settings(config.model, read_info(path).model, "")
    all_here = {key.removeprefix(MODEL) for key in expected}
    if is_model and of_checkpoint != of_run and of_checkpoint | of_run <= all_here:
        raise UserError(
            f"the checkpoint {path} has optimizer state of {count(len(of_checkpoint), 'parameter')}, this run trains "
            f"{len(of_run)}: training.freeze_layers or adapter.rank differs; use that of the run that wrote it, or "
            "start from its weights alone with --checkpoint.init instead of --checkpoint.resume"
        )
    _refuse_other_model(config, path, expected, shapes, "--checkpoint.resume")


def parameter_of(key: str) -> str:
    """The parameter that a tensor of a checkpoint is, or is optimizer state of."""
    return key.split(".", 2)[2] if key.startswith(STATE) else key.removeprefix(MODEL)


def _trained(keys: Iterable[str]) -> set[str]:
    """Names of the parameters with optimizer state."""
    return {parameter_of(key) for key in keys if key.startswith(STATE)}


def check_start(config: RunConfig, path: Path) -> None:
    """Refuse a checkpoint whose weights a run cannot start from, since it is of another model.

    Raises:
        UserError: lists all differences, or why the checkpoint cannot be read.
    """
    _refuse_other_model(config, path, *weights_only(config, path), "--checkpoint.init")


def stored_shapes(path: Path) -> Shapes:
    """Shapes of a checkpoint's tensors by key; ``None`` for what is no tensor."""
    # Not before a checkpoint is read: DCP takes half as long to load as PyTorch, and most runs begin without one.
    from pipeloom.training.checkpoints.planner import shapes_in
    from pipeloom.training.checkpoints.storage import CheckpointReader

    return shapes_in(CheckpointReader(path).read_metadata())


def weights_only(config: RunConfig, path: Path) -> tuple[Shapes, Shapes]:
    """Expected and stored shapes of parameters, without the optimizer's state; without adapters if none are stored."""
    found = expected_shapes(config), stored_shapes(path)
    expected, stored = ({key: one[key] for key in one if key.startswith(MODEL)} for one in found)
    if not any(map(is_pair, stored)):  # adapters of these weights begin anew
        expected = {key: expected[key] for key in without_pairs(expected)}
    if not any(map(is_bias, stored)):  # and so do biases of experts
        expected = {key: shape for key, shape in expected.items() if not is_bias(key)}
    return expected, stored


def _refuse_other_model(config: RunConfig, path: Path, expected: Shapes, stored: Shapes, flag: str) -> None:
    info = read_info(path)
    problems = other_settings(config.model, info.model, "the checkpoint has")
    problems += _other_adapter(config.pairs, info.adapter)
    problems += differences(expected, stored)
    if not problems:
        return
    run = run_of(path)
    hint = "use the model that wrote it"
    if run is not None and (run / CONFIG).exists():
        hint = f"start from its own configuration: {quoted('pipeloom', 'train', run / CONFIG, flag, path)}"
    raise UserError("\n".join([f"the checkpoint {path} is not of this model:", *(f"  - {p}" for p in problems), hint]))


_NAMES = {"rank": "adapter.rank", "alpha": "adapter.alpha", "targets": "adapter.targets"}
_NAMES["first_layer"] = "training.freeze_layers"


def _other_adapter(own: Adapter | None, stored: dict[str, Any] | None) -> list[str]:
    """Settings of adapters that differ from those of a checkpoint with adapters, a sentence each."""
    if own is None or stored is None:
        return []
    found = asdict(own) | {"targets": list(own.targets)}
    return [
        f"{name} is {found[key]}, the checkpoint has {stored.get(key)}"
        for key, name in _NAMES.items()
        if found[key] != stored.get(key)
    ]


def _refuse_other_replicas(config: RunConfig, path: Path) -> None:
    """Refuse optimizer state of replicas that step alone for other replicas: each has its own."""
    layout, own = read_info(path).layout, config.layout
    wrote = layout.get("dp", 1) if layout.get("average_every") is not None else None
    reads = own.dp if own.average_every is not None else None
    if wrote == reads:
        return
    of_checkpoint, of_run = (
        "one optimizer state for all replicas"
        if one is None
        else f"{one} replicas that step alone (layout.average_every), each with its own optimizer state"
        for one in (wrote, reads)
    )
    raise UserError(
        f"the checkpoint {path} has {of_checkpoint}; this run has {of_run}; set layout.dp and layout.average_every as "
        "in the run that wrote it, or start from its weights alone with --checkpoint.init in place of "
        "--checkpoint.resume"
    )


def new_order(config: RunConfig, data: Data, info: CheckpointInfo) -> list[str]:
    """Settings that differ from the checkpoint's and change the batches that follow."""
    found = _text(config, data)
    earlier = {HELD_OUT: found[HELD_OUT], **info.data}  # checkpoints of earlier versions lack it
    return [name for name in found if _meaning(name, found[name]) != _meaning(name, earlier.get(name))]


def _meaning(name: str, value: object) -> object:
    """A setting's value; ``None`` for ``data.pack stream``: unset, a text is cut like that, or refuses ``stream``."""
    return None if (name, value) == (_PACK, "stream") else value


def step_size_of(info: CheckpointInfo) -> int:
    """Sequences that a step of the checkpoint's run read."""
    names = ("dp", "num_microbatches", "microbatches", "microbatch_size", "average_every")
    found = {name: info.layout[name] for name in names if name in info.layout}  # earlier versions lack some
    given: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}
    return Layout(**given).step_size


def parameter_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of a resolved run's model by name; on any rank, without communication."""
    return {name: tuple(one.shape) for name, one in _parameters(config)}


def trained_parameters(config: RunConfig) -> int:
    """How many of them the optimizer updates: the others are frozen."""
    return sum(one.numel() for _, one in _parameters(config) if one.requires_grad)


def _parameters(config: RunConfig) -> list[tuple[str, nn.Parameter]]:
    return list(stage_of(config, range(config.model.num_layers + 2), "meta").named_parameters())


def expected_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a checkpoint of a resolved run, by key; on any rank, without communication."""
    parameters = _parameters(config)
    found = {MODEL + name: tuple(parameter.shape) for name, parameter in parameters}
    is_alone = config.layout.average_every is not None
    replicas = range(config.layout.dp if is_alone else 1)
    for name, parameter in parameters:
        states = config.optimizer.rule.state_shapes(name, tuple(parameter.shape)) if parameter.requires_grad else {}
        for replica in replicas:
            found |= {state_prefix(key, replica) + name: its_shape for key, its_shape in states.items()}
        if is_alone and parameter.requires_grad:
            found[state_prefix(OUTER) + name] = tuple(parameter.shape)
    return found | {MODEL + name: shape for name, shape in _bias_shapes(config).items()}


def _bias_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the biases of experts by name, which no optimizer updates."""
    if config.model.experts is None or config.model.balance != "bias":
        return {}
    stage = stage_of(config, range(config.model.num_layers + 2), "meta")
    return {f"{block}.{BIAS}": (config.model.experts,) for block in balances_of(stage)}


def state_prefix(name: str, replica: int = 0) -> str:
    """Prefix of the keys of one kind of optimizer state; of a replica, where replicas step alone."""
    return f"{STATE}{name}@{replica}." if replica else f"{STATE}{name}."


def _text(config: RunConfig, data: Data | None) -> dict[str, Any]:
    sources = config.data.sources
    return {
        **({} if sources is None else {"data.sources": [one.weight for one in sources]}),
        "text": None if data is None else data.corpus_sha256,
        "data.tokenizer": config.data.tokenizer_kind,
        HELD_OUT: config.data.validation_fraction,
        "data.seq_len": config.data.seq_len,
        _PACK: config.data.pack,
        "data.attention": config.data.attention if config.data.by_document else None,  # which earlier ones lack
        "training.seed": config.training.seed,
    }
