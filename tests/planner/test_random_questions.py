"""Random questions to the planner; ``make random-plans`` has more of them, with longer time limits."""

import pytest
from random_questions import ask, random_case


@pytest.mark.usefixtures("loses_exceptions")
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_answers_to_random_questions_keep_time_and_memory_and_are_written_as_they_were_planned(first):
    for seed in range(first, first + 10):
        outcome = ask(random_case(seed, budgets_s=(0.15,)))
        assert outcome.problems == [], seed
        assert outcome.refusal is None or outcome.refusal.strip()
