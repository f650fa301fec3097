"""docs/reproduction/sparse.md: its predicted data file is computed again, its tables are the data files."""

from statistics import fmean

from reproduction import sparse
from reproduction.tables import fill, read_rows

ROWS, PRODUCTS, LOSSES = (read_rows(name) for name in (sparse.NAME, sparse.PRODUCTS, sparse.LOSS))
PAGE = sparse.PAGE.read_text(encoding="utf-8")


def test_the_rows_are_computed_again():
    assert sparse.step_rows() == ROWS


def test_the_tables_are_the_rows():
    assert fill(PAGE, sparse.blocks(ROWS, PRODUCTS, LOSSES)) == PAGE


def test_the_sentences_hold():
    every, part = sparse.ceilings().values()
    assert (round(every, 1), round(part, 1)) == (5.1, 2.8)
    assert (round(4.5 / every, 2), round(4.5 / part, 1)) == (0.88, 1.6)
    dense, fine, coarse = (float(row["step_ms"]) for row in ROWS)
    assert (round(dense / fine, 1), round(dense / coarse, 1)) == (0.9, 1.5)
    assert round(float(ROWS[0]["state_gb"]) / float(ROWS[1]["state_gb"])) == 6
    # Density 1/4 of GPT-3 XL: h = 2,048, 24 layers, 2,048 tokens.
    rest = 2048 / (6 * 2048) + 50257 / (12 * 24 * 2048)
    assert round((1 + rest) / (0.25 + rest), 1) == 2.5


def test_the_product_of_width_1024_is_twice_as_fast_at_least():
    found = {
        (row["outputs"], row["density"], row["block"]): float(row["times"])
        for row in PRODUCTS
        if row["inputs"] == "1024"
    }
    assert found["1024", "0.125", "64"] >= 2
    assert found["1024", "0.5", "64"] < 1


def test_sparse_then_dense_has_less_loss_than_dense_at_equal_flops():
    names = "dense", "dense, equal FLOPs", "sparse", "sparse, then dense"
    found = {(name, rate): sparse.losses_of(LOSSES, name, rate) for name in names for rate in ("0.001", "0.003")}
    assert {len(losses) for losses in found.values()} == {3}
    assert all(max(found[names[3], rate]) + 0.1 < min(found[names[1], rate]) for rate in ("0.001", "0.003"))
    dense, equal, alone, both = (min(fmean(found[name, rate]) for rate in ("0.001", "0.003")) for name in names)
    assert round(equal - both, 2) == 0.33
    assert (round(alone - dense, 2), round(both - dense, 2)) == (0.05, 0.02)
    assert round((alone - both) / (alone - dense), 1) == 0.5
