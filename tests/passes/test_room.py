"""Free intervals on the lane of moves."""

import random

from pipeloom.passes.room import _Lane


def test_a_search_that_continues_finds_what_a_search_from_the_deadline_finds():
    draw = random.Random(1)
    for _ in range(100):
        lane, taken = _Lane(), list[tuple[float, float]]()
        sizes, deadlines = [draw.choice((0.5, 1.0, 2.0)) for _ in range(2)], [draw.randint(5, 40) for _ in range(4)]
        for _ in range(40):
            seconds, deadline_s = draw.choice(sizes), float(draw.choice(deadlines))
            earliest_s = draw.randint(0, int(deadline_s)) * 1.0
            found = lane.latest(earliest_s, deadline_s, seconds)
            assert found == _Lane(list(lane.begins), list(lane.ends)).latest(earliest_s, deadline_s, seconds)
            if found is not None and draw.random() < 0.6:
                lane.take(found, seconds)
                taken.append((found, seconds))
            elif taken and draw.random() < 0.2:
                lane.free(*taken.pop(draw.randrange(len(taken))))
