"""The rows around one place, with a mark: what every message about a schedule shows."""

from collections.abc import Sequence

from pipeloom.schedule.action import Action


def window(rows: Sequence[Sequence[Action]], rank: int, slot: int | None, reach: int = 5, neighbours: int = 2) -> str:
    """Text of the rows near ``rank``, cut to the slots near ``slot``.

    Args:
        rows: a row of actions for each pipeline rank.
        rank: the row to mark with ``>``.
        slot: the action to mark with ``>...<``; ``None`` shows the beginning of the rows.
        reach: slots shown on either side.
        neighbours: ranks shown above and below.
    """
    first_slot = max(0, (slot or 0) - reach)
    last_slot = (slot or 0) + reach if slot is not None else 2 * reach
    first_rank, last_rank = max(0, rank - neighbours), min(len(rows) - 1, rank + neighbours)
    shown = {r: [str(a) for a in rows[r][first_slot : last_slot + 1]] for r in range(first_rank, last_rank + 1)}
    if slot is not None and slot - first_slot < len(shown[rank]):
        shown[rank][slot - first_slot] = f">{shown[rank][slot - first_slot]}<"
    # Cells of one width, so that slots are aligned.
    width = max((len(cell) for cells in shown.values() for cell in cells), default=0)
    lines = [f"  slots {first_slot} to {last_slot}:"]
    for r, cells in shown.items():
        dots = "... " if first_slot else ""
        more = " ..." if len(rows[r]) > last_slot + 1 else ""
        lines.append(
            f"{'>' if r == rank else ' '} rank {r}: {dots}{' '.join(c.ljust(width) for c in cells).rstrip()}{more}"
        )
    return "\n".join(lines)
