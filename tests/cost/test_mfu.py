"""Model FLOPs utilization by the exact formula of PaLM (arXiv 2204.02311, appendix B)."""

import pytest

from pipeloom.catalog import load_model
from pipeloom.cost.flops import mfu


def test_the_published_utilization_of_llama_13b_is_reproduced():
    # arXiv 2311.05610: 13B on 64 A100, batch 2048, sequences of 2048, 26.5395 s a step, 70.57 %.
    shape = load_model("llama-13b")
    parameters = shape.parameters + (2 * shape.layers + 1) * shape.hidden
    tokens_per_s = 2048 * 2048 / 26.53954972161187
    got = mfu(
        tokens_per_s, parameters=parameters, layers=40, hidden=5120, seq_len=2048, devices=64, peak_flops_per_s=312e12
    )
    by_hand = tokens_per_s * (6 * 13_998_904_320 + 12 * 40 * 5120 * 2048) / (64 * 312e12)
    assert got == pytest.approx(by_hand, rel=1e-9)
    assert got == pytest.approx(0.7057, abs=2e-3)  # the published figure is the mean over steps
