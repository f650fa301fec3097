"""Facts of programs, switched off one at a time."""

from dataclasses import replace
from pathlib import Path

from ablation import facts_of, matters, without
from pipeloom.accuracy.rows import read_rows
from pipeloom.catalog import load_software

ROW = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")[0]
PROGRAM = load_software("megatron-core")


def test_a_fact_is_what_differs_from_the_defaults_and_switched_off_it_has_the_default():
    facts = facts_of(PROGRAM)
    assert {"overlap", "fuses_accumulation", "native_attention"} <= set(facts)
    assert not {"name", "efficiency", "sets"} & set(facts)
    assert facts_of(without(PROGRAM, "overlap")) == [fact for fact in facts if fact != "overlap"]


def test_a_fact_matters_if_it_changes_a_step():
    flash = replace(ROW, run=replace(ROW.run, attention="flash2"), device="h100-sxm-80gb")
    assert matters([flash], PROGRAM, "native_attention")
    assert not matters([flash], PROGRAM, "fuses_casts")  # products of 16 bits
