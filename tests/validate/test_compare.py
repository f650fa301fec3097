"""Which cluster and program a row gets, and what happens to rows that cannot be predicted."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.errors import UserError
from pipeloom.validate.compare import cluster_of, compare, program_of
from pipeloom.validate.rows import read_rows

ROW = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")[0]


@pytest.mark.parametrize(
    ("set_name", "attention", "program"),
    [
        ("layouts-2311.05610-main", "flash2", "scaling-2023b"),
        ("layouts-2311.05610-main", "flash1", "scaling-2023a"),
        ("vtrain-multi-node", "fused-softmax", "vtrain-multi"),
        ("nanotron-ultrascale", "flash2", "nanotron"),
        ("my own runs", "flash2", "megatron-2021"),
    ],
)
def test_the_set_and_the_kernel_choose_the_program(set_name, attention, program):
    row = replace(ROW, set_name=set_name, run=replace(ROW.run, attention=attention))
    assert program_of(row)[0] == program


def test_the_device_chooses_the_cluster_and_the_program_decides_between_two():
    program = program_of(replace(ROW, set_name="nanotron-x"))[1]
    assert cluster_of(replace(ROW, device="h100-sxm-80gb"), program).name == "nanotron-h100-efa"
    assert cluster_of(ROW, program).name == "dgx-a100"
    with pytest.raises(UserError, match="no cluster of the catalog has the device 'abacus'"):
        cluster_of(replace(ROW, device="abacus"), program)


def test_rows_that_no_family_can_make_are_counted_and_the_others_predicted():
    run = replace(ROW.run, dp=4, pp=8)
    rows = [ROW, *(replace(ROW, run=replace(run, schedule=name)) for name in ("chimera", "1f1b", "zb-1p"))]
    rows.append(replace(ROW, run=replace(run, schedule="1f1b", loops=2)))
    answer = compare(rows)
    assert answer.skipped == {"chimera": 1, "1f1b": 1}
    assert len(answer.outcomes) == 3
    assert answer.to_json()["summary"]["rows"] == 3
