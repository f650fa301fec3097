"""The training recipe of a model's file: read with its source, used by runs that set none, and accounted for."""

import json

import pytest

from pipeloom import load_run
from pipeloom.catalog import names, read_model
from pipeloom.cli import main
from pipeloom.config import unset, usual_values
from pipeloom.errors import ConfigError
from pipeloom.predict.recipes import recipe_notes

LLAMA = {"model": {"preset": "llama-13b"}, "data": {"seq_len": 2048}}


@pytest.mark.parametrize("name", [name for name in names("models") if read_model(name).recipe is not None])
def test_every_recipe_has_a_source_and_a_rate_that_a_run_takes(name):
    recipe = read_model(name).recipe
    assert "arXiv" in recipe.source
    run = load_run(model={"preset": name})
    assert run.optimizer.lr == recipe.optimizer["lr"] > 0
    assert not {"optimizer.lr"} & set(unset(run))


def test_a_run_has_the_recipe_of_its_model_and_steps_for_its_tokens():
    run = load_run(**LLAMA, layout={"num_microbatches": 64, "microbatch_size": 32})
    own = run.optimizer
    assert (own.lr, own.lr_warmup_steps, own.betas, own.weight_decay) == (3e-4, 2000, (0.9, 0.95), 0.1)
    assert (own.clip_grad_norm, own.lr_min_fraction) == (1.0, 0.1)
    assert run.training.steps == round(1e12 / (2048 * 2048))
    # The rate was chosen for batches of 4M tokens, and so are these.
    assert len(recipe_notes(run)) == 2
    assert usual_values(run) == "optimizer.eps 1e-08: usual values, which are not from a recipe of this model."


def test_a_batch_of_another_size_and_what_no_setting_expresses_are_listed():
    assert any("keeps the rate" in note for note in recipe_notes(load_run(**LLAMA)))
    gpt = recipe_notes(load_run(model={"preset": "gpt-175b"}))
    assert any("260B of 300B tokens" in note for note in gpt)


@pytest.mark.parametrize("own", [{"lr": 1e-3}, {"name": "sgd"}])
def test_a_run_with_its_own_rate_or_rule_takes_nothing_of_the_recipe(own):
    run = load_run(**LLAMA, optimizer=own)
    assert (run.optimizer.lr_warmup_steps, run.training.steps) == (None, None)
    assert recipe_notes(run) == ()


def test_a_single_setting_over_the_recipe_stays():
    run = load_run(**LLAMA, optimizer={"clip_grad_norm": 0.5})
    assert (run.optimizer.clip_grad_norm, run.optimizer.lr) == (0.5, 3e-4)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("lr = 0", "[recipe] lr must be a number above 0"),
        ('lr = 1\nlr_schedule = "wsd"', "[recipe] lr_schedule must be one of cosine, found 'wsd'"),
        ('lr = 1\noptimizer = "adafactor"', "[recipe] optimizer must be one of adamw, found 'adafactor'"),
        ("lr = 1\nsteps = 2\ntokens = 3", "[recipe] steps and tokens cannot both be there"),
        ("lr = 1\nz_loss = 1e-4", "[recipe] there is no key 'z_loss' here"),
    ],
)
def test_a_recipe_with_what_no_run_uses_is_refused(tmp_path, lines, problem):
    file = tmp_path / "own.toml"
    file.write_text(f'base = "llama-13b"\nname = "own"\n[recipe]\nsource = "a paper"\n{lines}\n')
    with pytest.raises(ConfigError) as caught:
        read_model(str(file))
    assert any(problem in one for one in caught.value.problems)


def test_a_model_with_a_base_has_not_the_recipe_of_the_base(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('base = "llama-13b"\nname = "own"\nlayers = 20\n')
    assert read_model(str(file)).recipe is None


def test_exports_have_the_figures_of_the_recipe_and_its_source(tmp_path, capsys):
    words = ["launch", "--model.preset", "llama-13b", "--data.seq-len", "2048", "--layout.dp", "64", "--layout.tp", "4"]
    words += [
        "--layout.pp",
        "1",
        "--layout.loops",
        "1",
        "--machine.cluster",
        "dgx-a100",
        "--training.dtype",
        "bfloat16",
    ]
    words += ["--schedule.family", "depth-first"]
    assert main([*words, "--to", "megatron", "torchtitan", "--out", str(tmp_path)]) == 0
    assert "arXiv 2302.13971" in capsys.readouterr().out
    script = (tmp_path / "megatron.sh").read_text()
    wanted = {"--lr": 3e-4, "--min-lr": 3e-5, "--lr-warmup-iters": 2000, "--adam-beta2": 0.95, "--clip-grad": 1}
    assert {flag: float(script.split(f"{flag} ")[1].split()[0]) for flag in wanted} == pytest.approx(wanted)
    module = (tmp_path / "torchtitan_run.py").read_text()
    assert "LR_MIN_FRACTION = 0.1\n" in module
    assert "BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-08, 0.1" in module
    assert all("arXiv 2302.13971" in text for text in (script, module))


def test_a_plan_writes_the_recipe(tmp_path, capsys):
    words = ["plan", "--model", "llama-13b", "--cluster", "dgx-a100", "--devices", "8", "--global-batch", "64"]
    words += ["--seq", "2048", "--no-explain", "--json", "--pp", "1", "--tp", "8", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["layouts"]
    text = (tmp_path / "out" / "run.toml").read_text()
    rates = 'lr = 0.0003\nlr_warmup_steps = 2000\nlr_min_fraction = 0.1\nlr_decay_style = "cosine"\nbetas = [0.9, 0.95]'
    assert rates in text
    assert f"steps = {round(1e12 / (64 * 2048))}" in text
