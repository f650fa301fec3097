"""Products in 8 bits in questions: for programs that run them."""

import pytest

from pipeloom.errors import ConfigError
from pipeloom.planner.plan import make_question, plan
from pipeloom.planner.run_file import run_config


def question(**changes):
    wanted = {"num_devices": 8, "global_batch": 16, "seq": 4096, "launcher": "megatron", "tp": (1, 2), "pp": (1, 2)}
    return make_question("llama-3-8b", "dgx-h100", **(wanted | changes))


def test_a_plan_is_faster_with_products_in_8_bits_and_its_run_file_has_them():
    wide, narrow = (plan(question(matmul_dtype=dtype), count=1, explains=False).best for dtype in (None, "float8"))
    assert narrow.prediction.step_time_s < wide.prediction.step_time_s
    assert narrow.peak_flops_per_s == pytest.approx(8 * 1979e12)
    config = run_config(narrow, "llama-3-8b", "dgx-h100", "megatron-core")
    assert (config.training.dtype, config.training.matmul_dtype) == ("bfloat16", "float8")


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [("torchtitan", "pipeloom does not start torchtitan with fp8"), ("pipeloom", "train does not run fp8 products")],
)
def test_programs_that_are_not_started_with_them_refuse_them(launcher, reason):
    with pytest.raises(ConfigError, match=f"training.matmul_dtype: {reason}"):
        question(launcher=launcher, matmul_dtype="float8")


def test_a_device_without_a_peak_refuses_them():
    with pytest.raises(ConfigError, match="a100-sxm-80gb has no peak for products in fp8"):
        make_question(
            "llama-3-8b",
            "dgx-a100",
            num_devices=8,
            global_batch=16,
            seq=4096,
            launcher="megatron",
            matmul_dtype="float8",
        )
