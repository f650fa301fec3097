"""Fewer draws of a check at every commit."""

import pytest


def thinned(cases, step):
    """Each ``step``-th of the cases for ``make test``; the others are long, for ``make test-all``.

    Where cases repeat with a period, as those of a product of lists do, take a step that has no factor in common with
    it: then each value of each list is among what stays.

    Args:
        cases: values for ``pytest.mark.parametrize``; a case of several values is a tuple.
        step: 1 leaves all of them.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*one, marks=[pytest.mark.long] if n % step else []) for n, one in enumerate(values)]
