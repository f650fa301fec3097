"""The names of types, and the one that a run has which names none."""

from dataclasses import replace
from typing import get_args

import pytest

from pipeloom.catalog import load_cluster
from pipeloom.config import RunConfig, TrainingConfig, find_problems
from pipeloom.workload.dtypes import Dtype, Precision, default_dtype, dtype_of, precision_of


def test_every_name_of_the_cost_model_is_a_type():
    assert [precision_of(dtype_of(precision)) for precision in get_args(Precision)] == list(get_args(Precision))
    assert [dtype for dtype in get_args(Dtype) if precision_of(dtype) is None] == ["float64"]


@pytest.mark.parametrize(
    ("is_gpu", "precisions", "expected"),
    [
        (True, ("fp32", "bf16", "fp16"), "bfloat16"),
        (True, ("fp32", "fp16"), "float16"),
        (True, ("fp32",), "float32"),
        (False, ("fp32", "bf16"), "float32"),
        (False, ("bf16",), "bfloat16"),
    ],
)
def test_the_default_is_what_the_devices_compute_in(is_gpu, precisions, expected):
    assert default_dtype(is_gpu=is_gpu, precisions=precisions) == expected


@pytest.mark.parametrize(
    ("cluster", "expected"), [("dgx-h100", "bfloat16"), ("dgx-1-v100", "float16"), ("laptop", "float32")]
)
def test_the_default_of_a_cluster_is_that_of_its_devices(cluster, expected):
    assert load_cluster(cluster).default_dtype(4) == expected


def test_training_has_its_default_by_its_device():
    assert TrainingConfig().known_dtype == "float32"
    assert TrainingConfig(device="cuda").known_dtype == "bfloat16"
    assert TrainingConfig(device="cuda", dtype="float32").known_dtype == "float32"


def test_training_refuses_float16_by_name_and_predictions_do_not():
    config = replace(RunConfig(), training=TrainingConfig(dtype="float16"))
    (problem,) = find_problems(config)
    assert problem.startswith(
        "training.dtype float16 needs a scaled loss, which train does not have; use one of float32"
    )
    assert find_problems(config, trains=False) == []
