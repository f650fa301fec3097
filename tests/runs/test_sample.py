"""The file of a text sample: which part is the validation text, and which is the model's."""

import pytest

from pipeloom.runs.sample import Sample, format_sample, parse_sample


@pytest.mark.parametrize(
    "sample",
    [
        Sample("built-in fun", "ction\n    return 1\n"),
        Sample("", ""),
        Sample("model\nprompt (validation text)\n  | a", "\nmodel\n\r\x0b\u2028"),
    ],
)
def test_both_parts_come_back_whatever_they_contain(sample):
    assert parse_sample(format_sample(sample)) == sample


def test_the_parts_have_heads_and_a_text_of_an_earlier_version_is_whole():
    text = format_sample(Sample("one", "two\nthree"))
    assert text == "prompt (validation text)\n  | one\nmodel\n  | two\n  | three\n"
    assert parse_sample("def f():\n") == Sample("", "def f():\n")
