"""Numbers of the page's curves."""

import numpy as np

from pipeloom.report.curves import ink, inks


def test_digits_of_an_array_are_those_of_each_number():
    chance = np.random.default_rng(0)
    values = np.append(chance.lognormal(0, 12, 2000) * chance.choice([-1, 1], 2000), [0, 1, 1e6, 123456789, 1e-9])
    assert np.allclose(inks(values), [ink(value) for value in values.tolist()], rtol=1e-15, atol=0)
    assert np.median([len(repr(value)) for value in inks(values).tolist()]) <= 12
