"""The text sample of a run: a prompt from the validation text, and what the model wrote behind it."""

from dataclasses import dataclass

_PROMPT, _MODEL = "prompt (validation text)", "model"
_MARGIN = "  | "
"""Before each line of a text, so that no text looks like a head."""


@dataclass(frozen=True)
class Sample:
    """A text sample.

    Attributes:
        prompt: the beginning of the validation text; empty in files of earlier versions, whose text has both.
        continuation: from the model.
    """

    prompt: str
    continuation: str


def format_sample(sample: Sample) -> str:
    """The file: both texts under their heads."""
    parts = ((_PROMPT, sample.prompt), (_MODEL, sample.continuation))
    return "".join(f"{head}\n" + "".join(f"{_MARGIN}{line}\n" for line in text.split("\n")) for head, text in parts)


def parse_sample(text: str) -> Sample:
    """Read the file, also one of an earlier version, which is the text alone."""
    lines = text.removesuffix("\n").split("\n")
    if lines[0] != _PROMPT or _MODEL not in lines:
        return Sample("", text)
    middle = lines.index(_MODEL)
    prompt, continuation = (
        "\n".join(line.removeprefix(_MARGIN) for line in part) for part in (lines[1:middle], lines[middle + 1 :])
    )
    return Sample(prompt, continuation)
