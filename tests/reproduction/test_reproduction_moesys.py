"""docs/reproduction/moesys.md: its predicted data file is computed again, its tables are the data files."""

from reproduction import moesys
from reproduction.tables import fill, read_rows

ROWS, BALANCES = read_rows(moesys.NAME), read_rows(moesys.BALANCE)
PAGE = moesys.PAGE.read_text(encoding="utf-8")


def test_the_rows_are_computed_again():
    assert moesys.step_rows() == ROWS


def test_the_tables_are_the_rows():
    assert fill(PAGE, moesys.blocks(ROWS, BALANCES)) == PAGE


def test_the_sentences_hold():
    routed, _, active, whole = ({key: float(value) for key, value in row.items() if key != "model"} for row in ROWS)
    assert round(100 * (routed["step_ms"] / active["step_ms"] - 1)) == 13
    assert round(100 * (1 - routed["step_ms"] / whole["step_ms"])) == 64
    assert routed["state_gb"] == whole["state_gb"]
    assert routed["exposed_ms"] == whole["exposed_ms"] == 33
    assert (routed["tensors_of_a_stage"], active["tensors_of_a_stage"]) == (31, 9)
    assert routed["gathers_of_a_stage"] == active["gathers_of_a_stage"]
    assert {row["balance"] for row in BALANCES} == {"batch", "microbatch", "bias", "none"}
    assert len(BALANCES) == 12
