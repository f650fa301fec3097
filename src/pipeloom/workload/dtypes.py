"""Dtypes of weights and activations: names of runs and of the cost model, and the default."""

from collections.abc import Collection
from typing import Literal

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
"""As ``training.dtype`` and PyTorch spell them."""
Precision = Literal["fp32", "bf16", "fp16"]
"""As cluster files and tables of measurements spell them. float64 has none, since there are no measurements."""

_PRECISIONS: dict[Dtype, Precision] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DTYPES: dict[str, Dtype] = {precision: dtype for dtype, precision in _PRECISIONS.items()}
MatmulDtype = Literal["float8"]
"""As ``training.matmul_dtype`` spells the operands of linear layers, where they differ from ``training.dtype``."""
Products = Literal["fp8"]
"""As cluster files and tables of measurements spell them."""
_PRODUCTS: dict[MatmulDtype, Products] = {"float8": "fp8"}
TRAINED: tuple[Dtype, ...] = ("float32", "float64", "bfloat16")
"""Dtypes of ``pipeloom train``. float16 would need a scaled loss."""


def precision_of(dtype: Dtype) -> Precision | None:
    """The cost model's name of a dtype; ``None`` for one without costs."""
    return _PRECISIONS.get(dtype)


def products_of(dtype: MatmulDtype | None) -> Products | None:
    """The cost model's name of the operands of linear layers; ``None`` where they are weights and activations."""
    return None if dtype is None else _PRODUCTS[dtype]


def matmul_dtype_of(products: Products | None) -> MatmulDtype | None:
    """The inverse of ``products_of``."""
    return next((dtype for dtype, name in _PRODUCTS.items() if name == products), None)


def dtype_of(precision: str) -> Dtype:
    """The dtype of a name of the cost model."""
    return _DTYPES[precision]


def default_dtype(*, is_gpu: bool, precisions: Collection[str] = ("fp32", "bf16")) -> Dtype:
    """The default dtype: on GPUs bfloat16, or float16 where they lack that; elsewhere float32.

    Args:
        is_gpu: whether the devices are GPUs.
        precisions: that all devices compute in, as the cost model names them.
    """
    # bfloat16 has the exponents of float32, so that losses need no scaling; GPUs before Ampere have only float16.
    wanted: tuple[Dtype, ...] = ("bfloat16", "float16", "float32") if is_gpu else ("float32", "bfloat16", "float16")
    return next((dtype for dtype in wanted if _PRECISIONS[dtype] in precisions), "float32")
