"""Changed schedules and why they are refused, word for word, as another form of the rules found it.

That form was written for reading: it looped over actions, and was held equal to these over 90,000 changed schedules.
"""

import json
from pathlib import Path

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.schedule import Action, Level, Placement, Schedule
from pipeloom.schedule.rules import RULES, rule_name

CASES = [json.loads(line) for line in Path(__file__).with_name("refusals.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["refusal"].split("'")[1])
def test_a_changed_schedule_is_refused_in_the_same_words(case):
    rows = [tuple(map(Action.parse, row.split())) for row in case["rows"]]
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in case["settings"].items()}
    with pytest.raises(ScheduleError) as caught:
        Schedule(tuple(rows), Placement(tuple(case["placement"])), **settings | {"level": Level(settings["level"])})
    assert str(caught.value).splitlines()[0] == case["refusal"]


def test_every_rule_refuses_one_of_them():
    refused_by = {case["refusal"].split("'")[1] for case in CASES}
    assert refused_by == {rule_name(rule) for rules in RULES.values() for rule in rules}
