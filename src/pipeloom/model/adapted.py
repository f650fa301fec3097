"""Decoder-only models of transformers as pieces: each stage runs the model's own forward with its own modules alone.

There is no list of model types. In a stage the first own layer takes the stage's input, and the forward ends behind the
last own layer. Modules of other stages have no parameters. So the model's own code computes positions, rotary angles,
masks and arguments of the layers, in each stage.

A sum over layers or another value that a forward carries past the layers is lost: ``model.adapted_check`` compares the
pieces with the whole model. The classes of the installed transformers make a model; no file is executed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.catalog.adapted import adapted_config
from pipeloom.catalog.weight_files import FileTensor, WeightFiles
from pipeloom.model.adapted_outline import Outline, outline_of, whole_model
from pipeloom.model.key_values import KeyValueCache
from pipeloom.model.split import generator_seed
from pipeloom.model.tensor_parallel import TensorSlice
from pipeloom.model.visible_keys import Documents
from pipeloom.workload.layout import Recompute

_MODEL = "model."
"""Prefix of the parameters' names in a stage; the rest are the names of transformers."""


class _EndError(Exception):
    """Ends a model's forward with a stage's output."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class _Absent(nn.Module):
    """In the place of another stage's module: its input, which has no effect."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """The first argument; for indices a zero, which broadcasts."""
        first = args[0] if args else next(iter(named.values()))
        is_index = isinstance(first, Tensor) and not first.is_floating_point()
        return torch.zeros(1, 1, 1, device=first.device) if is_index else first


class _AbsentLayer(nn.Module):
    """In the place of another stage's layer: the residual stream as it is."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self._num_outputs = num_outputs

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """The input, in a tuple where layers return one."""
        return (hidden_states, *[None] * (self._num_outputs - 1)) if self._num_outputs else hidden_states


class AdaptedStage(nn.Module):
    """A range of a model's pieces: 0 is all before the layers, 1..L the layers, L + 1 all behind them.

    Parameters have the names of the whole model behind ``model.``, and no values until they are drawn or loaded.

    Args:
        text: the model's ``config.json``.
        outline: of the model.
        pieces: contiguous.
        device, dtype: of the parameters.
    """

    def __init__(
        self, text: str, outline: Outline, pieces: range, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        with _meta_parameters():
            model = whole_model(adapted_config(text), dtype)
        layers = _layers(model, outline)
        count = len(layers)
        self.has_embedding, self.has_head = 0 in pieces, count + 1 in pieces
        self.borrows = outline.tied and self.has_head and not self.has_embedding
        self.tied_name = _MODEL + _name_of(model, model.get_input_embeddings().weight)
        own = [piece - 1 for piece in pieces if 0 < piece <= count]
        for index in set(range(count)) - set(own):
            layers[index] = _AbsentLayer(outline.num_outputs)
        absent = (() if self.has_embedding else outline.before) + (() if self.has_head else outline.behind)
        for path in absent:
            model.set_submodule(path, _Absent())
        if self.borrows:
            del model.get_output_embeddings()._parameters["weight"]  # noqa: SLF001  borrowed, see ``borrow``
        self._own_layers = {index: layers[index] for index in own}
        self._bind(layers, own)
        _allocate(model, device, dtype)
        if outline.tied and self.has_embedding and self.has_head:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
        self.model = model
        self.borrowed: Tensor | None = None
        self._entry: Tensor | None = None

    def _bind(self, layers: nn.ModuleList, own: list[int]) -> None:
        """Let the stage's input in, and its output out."""
        if not self.has_embedding:
            entered = layers[own[0] if own else len(layers) - 1]
            entered.register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self.has_head:
            if own:
                layers[own[-1]].register_forward_hook(self._leave)
            else:
                layers[0].register_forward_pre_hook(self._leave_before, with_kwargs=True)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (self._entry, *args[1:]), named
        return args, {**named, "hidden_states": self._entry}

    @staticmethod
    def _leave(_: nn.Module, __: Any, output: Any) -> None:
        raise _EndError(output[0] if isinstance(output, tuple) else output)

    @staticmethod
    def _leave_before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _EndError(args[0] if args else named["hidden_states"])

    def borrow(self, weight_VH: Tensor | None) -> None:  # noqa: N803  upper-case letters in names are shapes
        """Give the head the embedding's matrix; ``None`` removes it. It does not become a parameter of this module."""
        self.borrowed = self.model.get_output_embeddings().weight = weight_VH

    def set_recompute(self, by_layer: Sequence[Recompute]) -> None:
        """Let layers run again in the backward, instead of keeping their activations; for all layers of the model."""
        for index, layer in self._own_layers.items():
            if by_layer[index] == "full":
                # No RNG state: models that draw random numbers are refused.
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def slices(self) -> dict[str, TensorSlice]:
        """For each parameter by name the whole of it: these stages are not divided over tensor-parallel ranks."""
        shapes = {name: tuple(one.shape) for name, one in self.named_parameters()}
        return {name: TensorSlice(shape, (0,) * len(shape)) for name, shape in shapes.items()}

    def replicated(self) -> frozenset[str]:
        """Names of parameters that several tensor-parallel ranks have: none."""
        return frozenset()

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, documents: Documents | None = None) -> Tensor:
        """From tokens_BT or x_BTH to x_BTH or logits_BTV, of whole sequences of one document each."""
        assert cache is None, "runs with cached keys and values are refused"
        assert documents is None, "runs with several documents in a sequence are refused"
        self._entry = None if self.has_embedding else x
        named = {"input_ids": x} if self.has_embedding else {"inputs_embeds": x}
        try:
            return self.model(**named, use_cache=False).logits
        except _EndError as end:
            return end.output
        finally:
            self._entry = None

    def draw(self, seed: int) -> None:
        """Draw first values by the model's own rule, for each module by its path: equal in every partition."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(torch.nan)
            # Children first, as transformers does: a module may draw some of its children's weights again.
            for path, module in reversed(list(self.model.named_modules())):
                if self.borrows and module is self.model.get_output_embeddings():
                    continue  # its matrix is that of the first stage
                torch.manual_seed(generator_seed(seed, path))
                if hasattr(module, "reset_parameters") and module._parameters:  # noqa: SLF001
                    module.reset_parameters()
                self.model._init_weights(module)  # noqa: SLF001  the only name of a model's rule


def adapted_stage(
    text: str, pieces: range, *, seed: int, dtype: torch.dtype, device: torch.device | str
) -> AdaptedStage:
    """Build and initialize one stage; as ``build_stage``."""
    outline = outline_of(text)
    if torch.device(device).type == "meta":
        stage = AdaptedStage(text, outline, pieces, device, dtype)
        if stage.borrows:
            first = AdaptedStage(text, outline, range(1), device, dtype)
            stage.borrow(first.get_parameter(first.tied_name).detach().requires_grad_())
        return stage
    # In float32 on the CPU: other devices and types would draw other numbers.
    stage = AdaptedStage(text, outline, pieces, "cpu", torch.float32)
    stage.draw(seed)
    for module in stage.model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device, dtype)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)  # noqa: SLF001  not their type, as rotary angles stay float32
    return stage


def piece_parameters(text: str) -> tuple[int, ...]:
    """Number of parameters that each piece multiplies with: none for the first, a tied matrix for the last."""
    outline = outline_of(text)
    with _meta_parameters():
        model = whole_model(adapted_config(text))
    sizes = [sum(one.numel() for one in layer.parameters()) for layer in _layers(model, outline)]
    behind = {id(one): one.numel() for path in outline.behind for one in model.get_submodule(path).parameters()}
    return (1, *sizes, sum(behind.values()))


def adapted_files(text: str) -> WeightFiles:
    """The tensors of the weight files of a model."""
    with _meta_parameters():
        model = whole_model(adapted_config(text))
        head = model.get_output_embeddings()
        tied = "" if head is None else f"{_path_of(model, head)}.weight"
        # transformers renames tensors of some types while it reads and writes them.
        names = {name: torch.empty_like(one) for name, one in model.named_parameters(remove_duplicate=False)}
        by_tensor = {id(one): name for name, one in names.items()}
        reverted = _as_in_files(model, names).items()
    renamed = {by_tensor[id(one)]: name for name, one in reverted if id(one) in by_tensor}
    return WeightFiles(
        prefix=f"{model.base_model_prefix}.",
        tensors=tuple(FileTensor(renamed.get(name, name), (_MODEL + name,)) for name, _ in model.named_parameters()),
        buffers=tuple(name for name, _ in model.named_buffers()),
        tied=renamed.get(tied, tied),
    )


def _as_in_files(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names in files; those that files store otherwise, such as one for each expert, are others."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def _layers(model: Any, outline: Outline) -> nn.ModuleList:
    layers = model.get_submodule(outline.layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def _name_of(model: Any, parameter: Tensor) -> str:
    return next(name for name, one in model.named_parameters() if one is parameter)


def _path_of(model: Any, module: nn.Module) -> str:
    return next(path for path, one in model.named_modules() if one is module)


def _allocate(model: Any, device: torch.device | str, dtype: torch.dtype) -> None:
    """Give all parameters and buffers of a model a device; parameters get a type, too, and have no values."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device, dtype=dtype))  # noqa: SLF001
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)  # noqa: SLF001


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Make parameters without memory; buffers, such as rotary frequencies, have their values."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield
