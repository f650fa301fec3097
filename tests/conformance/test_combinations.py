"""docs/combinations.md lists the features that work together; every accepted pair trains a step, and right.

The simulator takes each of them, and the planner all but those with a feature that it refuses by name.
"""

import json
import re
from itertools import chain

import pytest
import torch
from any_runs import DATA
from one_process import OneProcess
from thinned import thinned

from combinations_of_features import FEATURES, PAGE, blocks, config_of, pairs, settings_of
from pipeloom import predict_step
from pipeloom.cli import main
from pipeloom.training.session import resolve
from reproduction.tables import fill

UNCOMPARED = {
    "messages in 8 bits": "rounds activations",
    "bfloat16 weights alone": "computes in bfloat16",
    "updates within the step": "leaves no gradients",
    "averaged replicas": "leaves the gradient of each replica",
    "own micro-batches": "has a reference of its own, in tests/training/test_unequal_replicas.py",
}
"""Features whose gradients are not those of one process, and why."""
ELSEWHERE = {"stages in host memory"}
"""Features that need a thread for their copies (tests/execute/test_stage_swaps.py)."""
UNSEARCHED = {
    "own micro-batches": "layout.microbatches",
    "frozen layers": "training.freeze_layers",
    "shared layers": "model.share_layers",
    "averaged replicas": "layout.average_every",
}
"""Features that the planner refuses -> the setting that its sentence begins with."""
CHEAP = "--cluster laptop --families breadth-first --strategies none --loops 2 --micro-batch 1 --no-explain --json"
ACCEPTED = [pair for pair, reasons in pairs().items() if reasons == [] and not set(pair) & ELSEWHERE]


def test_the_page_has_what_the_rules_say():
    page = PAGE.read_text(encoding="utf-8")
    assert fill(page, blocks()) == page


def test_each_feature_works_by_itself_and_a_refused_pair_has_a_reason():
    found = pairs()
    assert not [problems for name in set(chain.from_iterable(found)) if (problems := config_of(name)[1])]
    assert sum(reasons == [] for reasons in found.values()) > len(found) / 2


@pytest.mark.parametrize("pair", thinned([(pair,) for pair in ACCEPTED], 16), ids=" with ".join)
def test_an_accepted_pair_trains_a_step(pair):
    config, _ = config_of(*pair)
    ranks = OneProcess(resolve(config, DATA))
    results = ranks.step()
    assert all(torch.isfinite(one).all() for result in results for one in result.outputs.values())
    if not set(pair) & UNCOMPARED.keys():
        assert max(ranks.differences(results).values()) < 1e-4


@pytest.mark.parametrize(
    "names", [*((name,) for name in FEATURES), *thinned([(pair,) for pair in ACCEPTED], 16)], ids=" with ".join
)
def test_what_is_accepted_is_simulated_and_planned_or_refused_in_one_sentence_for_each_setting(names, tmp_path, capsys):
    config, _ = config_of(*names)
    assert predict_step(config).prediction.step_time_s > 0
    run = tmp_path / "run.toml"
    settings = settings_of(*names)
    run.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    refused = sorted(UNSEARCHED[name] for name in names if name in UNSEARCHED)
    assert main(["plan", str(run), *CHEAP.split()]) == (2 if refused else 0)
    out, err = capsys.readouterr()
    assert sorted(re.findall(r"^ +- ([\w.]+): the search prices", err, flags=re.M)) == refused
    assert err.count("\n  - ") == len(refused)
    if not refused:
        assert json.loads(out)["layouts"]


def test_the_page_names_what_the_planner_refuses():
    _, _, planner = PAGE.read_text(encoding="utf-8").partition("## With the planner")
    planner, _, _ = planner.partition("`pipeloom simulate`")  # what follows is searched
    assert sorted(re.findall(r"`((?:layout|training|model)\.\w+)`", planner)) == sorted(UNSEARCHED.values())
