"""docs/reproduction/m6_10t.md: its predicted data file is computed again, its tables are the data files."""

from reproduction import m6_10t
from reproduction.tables import fill, read_rows

ROWS, LOSSES = read_rows(m6_10t.NAME), read_rows(m6_10t.LOSS)
PAGE = m6_10t.PAGE.read_text(encoding="utf-8")


def test_the_rows_are_computed_again():
    assert m6_10t.step_rows() == ROWS


def test_the_tables_are_the_rows():
    assert fill(PAGE, m6_10t.blocks(ROWS, LOSSES)) == PAGE


def test_the_sentences_hold():
    for devices in {row["devices"] for row in ROWS}:
        own, sets, one = (row for row in ROWS if row["devices"] == devices)
        gains = [1 - float(row["step_ms"]) / float(own["step_ms"]) for row in (sets, one)]
        assert all(0.01 < gain < 0.05 for gain in gains)
        assert float(one["exposed_ms"]) < float(own["exposed_ms"]) < float(sets["exposed_ms"])
    step = m6_10t.step_of(8, "dgx-h100")
    layers = step.placed.layers
    placement = step.placed.placement
    own = [sum(layers[stage] for stage in placement.stages_of(rank)) for rank in range(4)]
    sets = m6_10t.sets_by_rank(step)
    assert sets == [4] * 4
    assert own == [12] * 4
    for seed in {row["seed"] for row in LOSSES}:
        losses = [float(row["validation_loss"]) for row in LOSSES if row["seed"] == seed]
        assert losses == sorted(losses)
        assert len(losses) == 4
        assert 0.08 < losses[3] - losses[1] < 0.13
