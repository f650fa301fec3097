"""Small words for people."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pipeloom.terminal.words import (
    amount,
    and_finite,
    close_names,
    did_you_mean,
    format_bytes,
    parse_bytes,
    plural,
    same_name,
    unknown_name,
)

CLUSTERS = ["dgx-1-v100", "dgx-a100", "dgx-h100", "h200", "laptop", "vtrain-a100"]
MODELS = ["gpt-6.6b", "llama-13b", "llama-3-8b", "llama-3-70b"]


def test_several_of_a_noun():
    assert [plural(noun) for noun in ("stage", "micro-batch", "day", "model family")] == [
        "stages",
        "micro-batches",
        "days",
        "model families",
    ]


@pytest.mark.parametrize(
    ("name", "known", "close"),
    [
        ("trian", ["train", "plan", "tradeoff", "verify"], ["train"]),
        ("dgx-h200", CLUSTERS, ["h200", "dgx-h100"]),
        ("DGX_H200", CLUSTERS, ["h200", "dgx-h100"]),
        ("a100", CLUSTERS, ["dgx-a100", "vtrain-a100"]),
        ("dgx-v100", CLUSTERS, ["dgx-1-v100"]),
        ("llama13b", MODELS, ["llama-13b"]),
        ("llama-3", MODELS, ["llama-3-70b", "llama-3-8b"]),
        ("BREADTH-FIRST", ["breadth-first", "depth-first"], ["breadth-first"]),
        ("zebra", CLUSTERS, []),
        ("device", ["price_per_device_hour"], []),
        ("nodes", ["norm-eps"], []),
        ("", CLUSTERS, []),
        ("anything", [], []),
    ],
)
def test_the_closest_names_are_suggested(name, known, close):
    assert close_names(name, known) == close


def test_no_more_than_three_names_are_suggested():
    assert close_names("stage", [f"stage-{number}" for number in range(9)]) == ["stage-0", "stage-1", "stage-2"]


def test_a_suggestion_is_a_question():
    assert did_you_mean("trian", ["train", "plan"]) == "did you mean 'train'?"
    assert did_you_mean("dgx-h200", CLUSTERS) == "did you mean 'h200' or 'dgx-h100'?"
    assert did_you_mean("lr", ["lr-a", "lr-b", "lr-c"], "run.") == "did you mean 'run.lr-a', 'run.lr-b' or 'run.lr-c'?"
    assert did_you_mean("zebra", CLUSTERS) == ""
    assert unknown_name("family", "zebra", ["a", "b"]) == "there is no family 'zebra'; known: a, b"
    assert unknown_name("family", "gpip", ["gpipe"]) == "there is no family 'gpip'; did you mean 'gpipe'? known: gpipe"


@pytest.mark.parametrize(
    ("name", "same"), [("DGX-A100", "dgx-a100"), ("dgx_a100", "dgx-a100"), ("dgxa100", None), ("dgx-a10", None)]
)
def test_a_name_is_the_same_in_any_case_and_with_either_dash(name, same):
    assert same_name(name, CLUSTERS) == same


def test_a_limit_says_that_a_number_must_be_finite_where_it_is_not():
    assert and_finite("above 0", float("inf")) == "above 0 and finite"
    assert and_finite("above 0", -1.0) == "above 0"


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 KB"),
        (1500, "1.5 KB"),
        (999 * 10**6, "999 MB"),
        (2000.6 * 10**12, "2001 TB"),
        (64 * 2**20, "67.1 MB"),
        (12.345 * 10**9, "12.3 GB"),
    ],
)
def test_sizes_are_written_without_exponents(size, words):
    assert format_bytes(size) == words


@given(st.integers(1, 2**50))
def test_a_needed_size_is_never_printed_smaller(size):
    found = parse_bytes(format_bytes(size, rounds_up=True).replace(" bytes", ""))
    assert size <= found <= size * 1.011 + 1
    assert abs(parse_bytes(format_bytes(size).replace(" bytes", "")) - size) <= 0.006 * size + 1


@pytest.mark.parametrize("text", ["", "0", "0.2B", "-1GB", "1XB", "nan", "inf", "9" * 400 + "TiB", "9" * 5000])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a size such as"):
        parse_bytes(text)


def test_numbers_of_parameters_have_three_digits_and_a_letter():
    assert [amount(number) for number in (7, 127_968, 3.6e6, 1.01e12)] == ["7", "128 K", "3.6 M", "1.01 T"]
