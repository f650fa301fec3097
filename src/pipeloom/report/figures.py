"""Figures as the page writes them."""


def ms(seconds: float) -> str:
    """A time with its unit."""
    return f"{seconds * 1e3:,.1f} ms"


def tenths(seconds: float) -> str:
    """Milliseconds without their unit."""
    return f"{seconds * 1e3:,.1f}"


def percent(share: float) -> str:
    """A share of one."""
    return f"{share * 100:.1f} %"


def short(value: float) -> float:
    """As many digits as ink can show."""
    # Six digits are finer than a pixel, and a page of many curves is less than half as large.
    return float(f"{value:.6g}")
