"""Random questions to the planner; ``make random-plans`` has more of them, with longer time limits."""

import pytest
from random_questions import ask, random_case


@pytest.mark.usefixtures("loses_exceptions")
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_answers_to_random_questions_keep_time_and_memory_and_are_written_as_they_were_planned(first):
    kinds, seeds = set[str](), range(first, first + 10)
    for seed in seeds:
        outcome = ask(random_case(seed, budgets_s=(0.15,)))
        assert outcome.problems == [], seed
        assert outcome.refusal is None or outcome.refusal.strip()
        kinds.add(outcome.kind)
    # On a busy machine the time of all of them may be up before a layout is found.
    assert len(kinds) > 1 or any(ask(random_case(seed, budgets_s=(5.0,))).kind not in kinds for seed in seeds)
