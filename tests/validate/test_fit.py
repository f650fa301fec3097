"""Calibration finds the efficiencies that made the rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.catalog import load_cluster, load_software
from pipeloom.errors import UserError
from pipeloom.predict import predict
from pipeloom.validate.fit import fit, to_toml
from pipeloom.validate.rows import read_rows

ROWS = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")
CLUSTER = load_cluster("dgx-a100")
PROGRAM = load_software("megatron-2021")


def test_known_efficiencies_are_found_again(tmp_path):
    pytest.importorskip("scipy")
    true = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, matmul=0.7, tensor_bus=0.45))
    rows = [replace(row, step_time_s=predict(row.run, CLUSTER, true).step_time_s) for row in ROWS]
    result = fit(rows, CLUSTER, PROGRAM, ["matmul", "tensor_bus"])
    assert result.software.efficiency.matmul == pytest.approx(0.7, rel=0.02)
    assert result.software.efficiency.tensor_bus == pytest.approx(0.45, rel=0.05)
    assert result.mean_abs_error < 0.005
    file = tmp_path / "program.toml"
    file.write_text(to_toml(result, "from a test:"), encoding="utf-8")
    again = load_software(str(file))
    assert again.efficiency.matmul == pytest.approx(result.software.efficiency.matmul, rel=1e-3)
    assert replace(again, efficiency=PROGRAM.efficiency) == PROGRAM


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(UserError, match="nothing to fit"):
        fit([replace(ROWS[0], is_ok=False)], CLUSTER, PROGRAM)
    with pytest.raises(UserError, match="cannot fit luck; known: matmul"):
        fit(ROWS, CLUSTER, PROGRAM, ["luck"])
