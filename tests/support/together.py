"""Ranks of one tensor group in one process: what each of them computes, with their exchanges in between."""

from pipeloom.execute.communication.blocking_group import BlockingGroup
from pipeloom.execute.communication.collectives import InProcessGroups
from pipeloom.execute.communication.turns import Turn


def tensor_groups_in_process(size):
    """The group of each rank."""
    shared = InProcessGroups(size)
    return [BlockingGroup(shared.group(index)) for index in range(size)]


def run_together(functions):
    """Call every function, each as a rank in a turn of its own; the results in order."""
    turns = [Turn(_steps(function)) for function in functions]
    results, waiting = {}, {}
    while len(results) < len(turns):
        ready = [i for i in range(len(turns)) if i not in results and (i not in waiting or waiting[i].is_done())]
        assert ready, "every rank waits for another one"
        for index in ready:
            try:
                waiting[index] = next(turns[index])
            except StopIteration as end:
                results[index] = end.value
    return [results[index] for index in range(len(turns))]


def _steps(function):
    result = function()
    yield from ()
    return result
