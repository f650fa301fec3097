"""How far the host may be ahead of the device: a clock that lists what was waited for stands for the device."""

import pytest
from in_process import Post
from toy import Toy, objective

from pipeloom.execute.clock import Clock
from pipeloom.execute.executor import Executor
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.stages.stage import Stage
from pipeloom.families import make_schedule
from pipeloom.passes import lower


class Watched(Clock):
    """Marks are numbers, taken before and behind every compute action."""

    def __init__(self):
        self.number, self.waits = 0, []

    def mark(self):
        self.number += 1
        return float(self.number)

    def wait(self, mark):
        self.waits.append((self.number // 2, int(mark) // 2))


@pytest.mark.parametrize("run_ahead", [1, 3, 8, 100])
def test_the_host_waits_for_the_action_that_many_before(run_ahead):
    toy, clock = Toy(2, 4), Watched()
    schedule = lower(make_schedule("breadth-first", pp=1, loops=2, num_microbatches=4))
    outputs = toy.outputs()
    stages = {i: Stage(m, i, outputs[i], needs_input_gradient=i > 0) for i, m in enumerate(toy.modules())}
    settings = {"transport": Post().transport(0), "clock": clock, "run_ahead": run_ahead}
    Executor(schedule, 0, [Compute(stages)], **settings).run(toy.inputs(), objective)
    assert clock.number == 2 * 16
    assert clock.waits == [(done, done - run_ahead + 1) for done in range(run_ahead, 16)]
