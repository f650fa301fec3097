"""Lengths of token slices: the dynamic program finds what trying everything finds."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.planner.slice_lengths import LatencyTable, best_slices, judged_slices, trade_offs
from reproduction.terapipe import best_batches


def compositions(total):
    """Every way to write a number as a sum of positive ones, in order."""
    for cuts in product((False, True), repeat=total - 1):
        bounds = [0, *(place + 1 for place, is_cut in enumerate(cuts) if is_cut), total]
        yield tuple(end - begin for begin, end in pairwise(bounds))


def random_latency(seed, num_units):
    """Grows with the length and with the tokens before, in random steps."""
    steps = np.random.default_rng(seed).exponential(size=(2, num_units + 1))
    by_length, by_context = np.cumsum(steps, axis=1)
    return lambda length, before: by_length[length.astype(int)] + 0.1 * length * by_context[before.astype(int)]


def causal(length, before):
    """A fixed part, one for each token, and one for each key that a token sees."""
    return 1 + length + 0.01 * length * (length + 2 * before)


def formula_s(lengths, known, num_ranks, rounds):
    seconds = [known[length, sum(lengths[:number])] for number, length in enumerate(lengths)]
    return rounds * sum(seconds) + (num_ranks - 1) * max(seconds)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), num_units=st.integers(1, 12), num_ranks=st.integers(1, 9), rounds=st.integers(1, 4))
def test_no_composition_is_faster(seed, num_units, num_ranks, rounds):
    latency = random_latency(seed, num_units)
    found = best_slices(LatencyTable(latency, num_units), num_ranks, rounds)
    assert sum(found.lengths) == num_units
    places = [(length, before) for before in range(num_units) for length in range(1, num_units - before + 1)]
    known = {place: float(latency(*map(np.array, place))) for place in places}
    assert found.step_s(num_ranks, rounds) == pytest.approx(formula_s(found.lengths, known, num_ranks, rounds))
    best_s = min(formula_s(lengths, known, num_ranks, rounds) for lengths in compositions(num_units))
    assert found.step_s(num_ranks, rounds) == pytest.approx(best_s, rel=1e-12)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), num_sequences=st.integers(1, 4), num_units=st.integers(1, 4))
def test_no_groups_of_sequences_are_faster(seed, num_sequences, num_units):
    latencies = {size: random_latency(seed + size, num_units) for size in (1, 2, 3)}
    tables = {size: LatencyTable(latency, num_units) for size, latency in latencies.items()}
    found = best_batches(tables, num_sequences, num_ranks=4)
    assert sum(size for size, _ in found) == num_sequences

    def seconds(groups):
        every = [tables[size].slicing([0, *np.cumsum(lengths).tolist()]).seconds for size, lengths in groups]
        return sum(map(sum, every)) + 3 * max(map(max, every))

    ways = [sizes for sizes in compositions(num_sequences) if max(sizes) <= 3 and list(sizes) == sorted(sizes)]
    cuts = list(compositions(num_units))
    best_s = min(
        seconds(list(zip(sizes, lengths, strict=True)))
        for sizes in ways
        for lengths in product(cuts, repeat=len(sizes))
    )
    assert seconds([(size, one.lengths) for size, one in found]) == pytest.approx(best_s, rel=1e-12)


def test_lengths_are_multiples_of_the_unit():
    found = best_slices(LatencyTable(causal, 96, unit=8), 6)
    assert len(found.lengths) > 1
    assert all(length % 8 == 0 for length in found.lengths)
    assert sum(found.lengths) == 96


def test_later_slices_are_shorter_where_attention_costs():
    """They see more keys; the formula wants slices that take equally long."""
    found = best_slices(LatencyTable(causal, 256), 8)
    assert list(found.lengths) == sorted(found.lengths, reverse=True)
    assert found.lengths[0] > 1.5 * found.lengths[-1]
    assert max(found.seconds) < 1.5 * min(found.seconds)


def test_one_rank_does_not_slice():
    assert best_slices(LatencyTable(lambda length, before: 1 + length + 0 * before, 32), 1).lengths == (32,)


def test_trade_offs_fall_in_length_and_rise_in_sum():
    found = list(trade_offs(LatencyTable(causal, 24), 4))
    assert all(one.sum_s <= other.sum_s and max(one.seconds) > max(other.seconds) for one, other in pairwise(found))


def test_a_judge_has_the_last_word():
    table = LatencyTable(lambda length, before: 1 + length + 0 * before, 24)
    found, seconds = judged_slices(table, 4, 1, lambda lengths: 70.0 if len(lengths) == 3 else 80.0)
    assert (len(found.lengths), seconds) == (3, 70.0)


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), num_units=st.integers(1, 30), num_ranks=st.integers(1, 9), rounds=st.integers(1, 4))
def test_what_is_judged_best_is_not_slower_than_the_program_or_any_even_slices(seed, num_units, num_ranks, rounds):
    """Whatever the judge returns, as long as it is no less than what a rank computes."""
    table = LatencyTable(random_latency(seed, num_units), num_units)

    def step_s(lengths):
        bounds = np.cumsum([0, *lengths]).tolist()
        more = np.random.default_rng([seed, *lengths]).exponential()
        return rounds * table.slicing(bounds).sum_s * (1 + more)

    found, seconds = judged_slices(table, num_ranks, rounds, step_s)
    assert seconds == step_s(found.lengths)
    assert seconds <= step_s(best_slices(table, num_ranks, rounds).lengths)
    assert seconds <= min(step_s(table.even(number).lengths) for number in range(1, num_units + 1))


def test_even_slices_that_a_rank_cannot_compute_in_time_are_not_judged():
    table = LatencyTable(lambda length, before: 1 + length + 0 * before, 24)
    requested = []

    def step_s(lengths):
        requested.append(lengths)
        return 4 * (24 + len(lengths)) + 3 * (1 + max(lengths))

    found, seconds = judged_slices(table, 4, 4, step_s)
    assert set(map(len, requested)) < set(range(1, 25))
    assert all(4 * (24 + number) >= seconds for number in set(range(1, 25)) - set(map(len, requested)))
    assert seconds == step_s(found.lengths)


def test_messages_make_slices_shorter_where_they_only_delay():
    """They take nothing from the sum, and are as long as the slice."""
    alone = LatencyTable(causal, 96)
    with_messages = LatencyTable(causal, 96, through=lambda length, before: causal(length, before) + length)
    found, other = best_slices(with_messages, 6), best_slices(alone, 6)
    assert len(found.lengths) > len(other.lengths)
    assert found.step_s(6) == pytest.approx(found.sum_s + 5 * max(found.through_s))
    assert found.step_s(6) < with_messages.slicing([0, *np.cumsum(other.lengths).tolist()]).step_s(6)
    assert all(one > other for one, other in zip(found.through_s, found.seconds, strict=True))


def test_the_bubble_is_the_rest_of_the_step():
    one = LatencyTable(lambda length, before: length + 0 * before, 24).even(4)
    assert one.lengths == (6, 6, 6, 6)
    assert one.step_s(4) - one.sum_s == 18
    assert one.step_s(4, rounds=2) == 48 + 18
