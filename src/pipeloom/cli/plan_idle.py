"""Limits of ``pipeloom plan`` that have no effect in any layout of its questions."""

from collections.abc import Collection, Iterator, Sequence

from pipeloom.cli.idle import idle_sentence
from pipeloom.cli.plan_options import Options
from pipeloom.planner.question import ORDER, Question
from pipeloom.planner.strategies import limit_of

_NEEDS = {
    "boundary": (("pp",), "in layouts of one pipeline rank"),
    "shards": (("dp", "cp"), "in layouts of one data-parallel rank"),
    "sequence_parallel": (("tp",), "in layouts of one tensor-parallel rank"),
}
"""Option -> axes of which one has to have several ranks, and where it has no effect otherwise."""


def idle_limits(options: Options, given: Collection[str], questions: Sequence[Question]) -> Iterator[str]:
    """A sentence for each limit that is on the command line and has no effect.

    Args:
        options: of the command.
        given: names of the options on the command line.
        questions: those that have no other problem, one or more.
    """
    for name, (axes, where) in _NEEDS.items():
        if name in given and not any(question.may_divide(*axes) for question in questions):
            yield idle_sentence([f"--{name.replace('_', '-')}"], where)
    named = {name: f"--strategies {name}" for name in options.strategies if name != "none"}
    named |= {} if options.search_orders is None else {ORDER: "--search-orders"}
    for name, flag in named.items():
        reasons = [limit_of(name, question) for question in questions]
        if all(reason is not None for reason in reasons):
            yield f"{flag} has no effect: {reasons[0]}; leave it out"
