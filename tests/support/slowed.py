"""Stages whose forwards and backwards take a given time, for replicas of different speeds."""

import time

from pipeloom.execute.stages.stage import Stage

FORWARD_S, BACKWARD_S = 0.01, 0.02
SLOW, TIMES = 1, 3
"""The rank that takes so many times as long."""


def slow_down(rank):
    """Give the stages of this process their times; in a process that ends with the test."""
    times = TIMES if rank == SLOW else 1
    Stage.forward = _slowed(Stage.forward, FORWARD_S * times)
    Stage.backward = _slowed(Stage.backward, BACKWARD_S * times)


def _slowed(method, seconds):
    def run(*arguments, **settings):
        time.sleep(seconds)
        return method(*arguments, **settings)

    return run
