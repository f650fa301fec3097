"""docs/combinations.md says which features work together; every pair that is accepted trains a step, and right."""

from itertools import chain

import pytest
import torch
from any_runs import DATA
from one_process import OneProcess
from thinned import thinned

from combinations_of_features import PAGE, blocks, config_of, pairs
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
ACCEPTED = [pair for pair, reasons in pairs() if reasons == [] and not set(pair) & ELSEWHERE]


def test_the_page_has_what_the_rules_say():
    page = PAGE.read_text(encoding="utf-8")
    assert fill(page, blocks()) == page


def test_each_feature_works_by_itself_and_a_refused_pair_has_a_reason():
    found = dict(pairs())
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
