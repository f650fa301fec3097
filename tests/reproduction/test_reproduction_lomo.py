"""docs/reproduction/lomo.md: its data file is computed again, its tables are the data file, its sentences hold."""

from reproduction import lomo
from reproduction.tables import fill, read_rows

ROWS = read_rows(lomo.NAME)
PAGE = lomo.PAGE.read_text(encoding="utf-8")


def test_the_rows_are_computed_again():
    assert lomo.memory_rows() == ROWS


def test_the_tables_are_the_rows():
    assert fill(PAGE, lomo.memory_blocks(ROWS)) == PAGE


def test_the_sentences_hold():
    row_of = {(row["model"], row["way"]): {key: float(row[key]) for key in row if key.endswith("_gb")} for row in ROWS}
    assert "then neither model fits" in PAGE
    for model in lomo.SIZES:
        adamw, behind, within, narrow = (row_of[model, way] for way in lomo.WAYS)
        assert within["beyond_device_gb"] > 0 > narrow["beyond_device_gb"]
        assert adamw["moments_gb"] > 0 == behind["moments_gb"] == within["moments_gb"] == narrow["float32_weights_gb"]
        step = lomo.step_of(model, "LOMO within the step")
        largest = sorted(step.placed.parameters)[-1 if model == "7B" else -2 :]
        assert abs(within["gradients_gb"] - 4 * sum(largest) / 1e9) < 0.01
