"""Small words for people."""


def count(number: int, noun: str) -> str:
    """A number with its noun: ``1 stage``, ``2 stages``, ``3 micro-batches``."""
    plural = f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
