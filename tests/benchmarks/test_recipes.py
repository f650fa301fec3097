"""Published trainings beside plans for them: seconds from published FLOP/s, and the same layout in both plans."""

import tomllib

import pytest

from recipes import HERE, question_of, row_of

RECIPES = {one["name"]: one for one in tomllib.loads((HERE / "recipes.toml").read_text())["recipe"]}


def test_every_training_has_a_source_and_a_speed_and_its_layout_uses_the_devices():
    assert len(RECIPES) >= 20
    for recipe in RECIPES.values():
        assert recipe["source"]
        assert ("seconds" in recipe) != ("tflops" in recipe and recipe["counts"] in ("model", "hardware"))
        question = question_of(recipe)
        assert question.global_batch % recipe["layout"]["dp"] == 0


def test_published_flops_become_seconds_by_the_formula_of_the_source():
    row = row_of(RECIPES["GPT 76.1B"])
    # 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)) of a step, arXiv 2104.04473, section 5.1 and appendix
    hidden, layers, batch, seq, vocab = 10240, 60, 1792, 2048, 51200
    flops = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert row.published_s == pytest.approx(flops / (1024 * 140e12), rel=0.02)
    assert row.same is not None
    assert (row.same.run.tp, row.same.run.pp, row.same.run.dp, row.same.run.recompute) == (8, 4, 32, "full")
    assert row.behind > 0


def test_a_published_layout_that_the_plan_chooses_has_a_rank():
    row = row_of(RECIPES["Llama 3 405B, 16,384"])
    assert row.rank is not None
    assert abs(row.error) < 0.15
