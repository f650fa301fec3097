"""Optimizers by name: their settings and state; only ``make`` imports torch.

An elementwise update runs on pieces of flat buffers, which shards cut anywhere. An optimizer that needs whole matrices
declares which (``Matrices``); shards are then cut at their borders.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from typing import Any

from pipeloom.errors import UserError, place_of
from pipeloom.registry import Registry

Setting = float | tuple[float, ...]
SHARED = ("betas", "eps", "momentum", "weight_decay")
"""Settings with a field in the section ``optimizer`` of a run file; an optimizer may take any of them."""


Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """The parameters that an optimizer updates as whole matrices, such as those of Muon or Adafactor.

    Attributes:
        takes: (name in the whole model, shape) -> whether the parameter is one; the same on every rank.
        state: key of ``optimizer.state[parameter]`` -> (shape of the parameter) -> shape of the state's tensor,
            ``None`` for no such tensor.
        flops: shape of a matrix -> FLOPs of the products in its update, for predictions.
    """

    takes: Callable[[str, Shape], bool]
    state: Mapping[str, Callable[[Shape], Shape | None]]
    flops: Callable[[Shape], float] = lambda _: 0.0


@dataclass(frozen=True, kw_only=True, eq=False)  # by identity, which makes it a key of caches
class Optimizer:
    """An optimizer.

    Attributes:
        summary: one line for help texts.
        settings: setting -> default. ``weight_decay`` is passed to ``make`` in the groups, 0 for vectors.
        state: keys of ``optimizer.state[parameter]`` whose tensors have the parameter's shape. They must begin as zeros
            and be changed in place, since swaps of stages move them; a scalar ``step`` is allowed beside them.
        make: ``(groups, lr=..., **settings)`` -> a ``torch.optim.Optimizer``, or what has its ``param_groups``,
            ``state``, ``defaults`` and ``step()``. A step skips parameters without gradient. With ``matrices``, each
            group has a bool ``is_matrix``.
        matrices: what is updated as whole matrices, whose state is not ``state``; ``None`` if the update is
            elementwise.
        takes_narrow: whether it updates weights that are narrower than their gradients.
        powers: key of its state -> of which power of the gradient it is a mean: 1 for momentum, 2 for squares. Without
            them, layers that share their weights cannot be delinked with the state.
        imports: modules that it loads late; a run loads them once, before its processes are forked. The base class of
            PyTorch's optimizers loads the compiler.
    """

    summary: str
    settings: Mapping[str, Setting]
    state: tuple[str, ...]
    make: Callable[..., Any]
    matrices: Matrices | None = None
    takes_narrow: bool = False
    powers: Mapping[str, int] = field(default_factory=dict[str, int])
    imports: tuple[str, ...] = ("torch._dynamo",)

    def __post_init__(self) -> None:
        """Refuse settings that ``make`` does not take.

        Raises:
            UserError: with the place of ``make``.
        """
        settings = {name: value for name, value in self.settings.items() if name != "weight_decay"}
        try:
            signature(self.make).bind([], lr=0.0, **settings)
        except ValueError:  # a function of C without a signature
            return
        except TypeError as error:
            raise UserError(f"make ({place_of(self.make)}) does not take lr and the settings: {error}") from None

    def takes_whole(self, name: str, shape: Shape) -> bool:
        """Whether it updates a parameter, by its name in the whole model, as a whole matrix."""
        return self.matrices is not None and self.matrices.takes(name, shape)

    def state_shapes(self, name: str, shape: Shape) -> dict[str, Shape]:
        """Key -> shape of the state's tensors of a parameter, by its name in the whole model."""
        if self.matrices is not None and self.matrices.takes(name, shape):
            found = {key: of(shape) for key, of in self.matrices.state.items()}
            return {key: its_shape for key, its_shape in found.items() if its_shape is not None}
        return dict.fromkeys(self.state, shape)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of each parameter, in single precision."""
        return 4 * len(self.state)


def _of_module(module: str, name: str) -> Callable[..., Any]:
    """What a module has under a name, called with the arguments of ``Optimizer.make``; imported at the call."""

    def make(groups: list[dict[str, Any]], lr: float, **settings: Setting) -> Any:
        return getattr(import_module(module), name)(groups, lr=lr, **settings)

    return make


def _of_torch(name: str) -> Callable[..., Any]:
    """The class of ``torch.optim`` of that name, updating in one kernel: a tenth of the time on one core of a CPU."""

    def make(groups: list[dict[str, Any]], lr: float, **settings: Setting) -> Any:
        optim = import_module("torch.optim")  # not before: what plans and simulates starts without torch
        return getattr(optim, name)(groups, lr=lr, fused=True, **settings)

    return make


_MOMENTS: Mapping[str, int] = {"exp_avg": 1, "exp_avg_sq": 2}
_FUSED_ADAMW = "pipeloom.training.optimizers.fused_adamw"
OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", "pipeloom.optimizers", Optimizer)
"""Every optimizer by name."""
OPTIMIZERS.add(
    "adamw",
    Optimizer(
        summary="Adam with decoupled weight decay (arXiv 1711.05101)",
        settings={"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        state=("exp_avg", "exp_avg_sq"),
        make=_of_module(_FUSED_ADAMW, "FusedAdamW"),
        powers=_MOMENTS,
        imports=(_FUSED_ADAMW,),
    ),
)
OPTIMIZERS.add(
    "sgd",
    Optimizer(
        summary="gradient descent with momentum; weight decay is added to the gradient",
        settings={"momentum": 0.9, "weight_decay": 0.1},
        state=("momentum_buffer",),
        make=_of_torch("SGD"),
        powers={"momentum_buffer": 1},
    ),
)


def _is_in_layer(name: str, shape: Shape) -> bool:
    """Whether a parameter is a matrix of a layer: of a module with a number, unlike embedding and head."""
    return len(shape) == 2 and any(part.isdigit() for part in name.split("."))


def _newton_schulz_flops(shape: Shape) -> float:
    """Of five steps on a matrix with m rows and n >= m columns, of three products each: 4 m m n + 2 m m m."""
    few, many = sorted(shape)
    return 5 * (4.0 * few * few * many + 2.0 * few**3)


OPTIMIZERS.add(
    "muon",
    Optimizer(
        summary="matrices of layers: orthogonalized momentum, scaled as AdamW's updates (Muon, arXiv 2502.16982); "
        "embedding, head and vectors: AdamW",
        settings={"momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        state=("exp_avg", "exp_avg_sq"),
        make=_of_module("pipeloom.training.optimizers.update_rules", "Muon"),
        matrices=Matrices(
            takes=_is_in_layer, state={"momentum_buffer": lambda shape: shape}, flops=_newton_schulz_flops
        ),
        powers={**_MOMENTS, "momentum_buffer": 1},
    ),
)
_SQUARES: Mapping[str, int] = {"row_var": 2, "col_var": 2, "variance": 2}
_RELATIVE: Mapping[str, Setting] = {"weight_decay": 0.0, "beta2_decay": -0.8, "clip": 1.0, "least_size": 1e-3}
_FACTORED = Matrices(
    takes=lambda _name, _shape: True,  # also of vectors the update depends on all elements
    state={
        "row_var": lambda shape: (*shape[:-1], 1) if len(shape) > 1 else None,
        "col_var": lambda shape: (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else None,
        "variance": lambda shape: None if len(shape) > 1 else shape,
    },
)
OPTIMIZERS.add(
    "adafactor",
    Optimizer(
        summary="second moments as rows and columns, updates relative to the size of a parameter (arXiv 1804.04235)",
        settings=_RELATIVE,
        state=("variance",),
        make=_of_module("pipeloom.training.optimizers.update_rules", "adafactor"),
        matrices=_FACTORED,
        powers=_SQUARES,
    ),
)
_LOMO = "pipeloom.training.optimizers.lomo"
OPTIMIZERS.add(
    "lomo",
    Optimizer(
        summary="gradient descent with decoupled weight decay, without state (LOMO, arXiv 2306.09782)",
        settings={"weight_decay": 0.0},
        state=(),
        make=_of_module(_LOMO, "Lomo"),
        takes_narrow=True,
        imports=(_LOMO,),
    ),
)
OPTIMIZERS.add(
    "adalomo",
    Optimizer(
        summary="second moments as rows and columns, normalized updates relative to the size of a parameter (AdaLomo, "
        "arXiv 2310.10195)",
        settings=_RELATIVE,
        state=("variance",),
        make=_of_module(_LOMO, "AdaLomo"),
        matrices=_FACTORED,
        takes_narrow=True,
        powers=_SQUARES,
        imports=(_LOMO,),
    ),
)
