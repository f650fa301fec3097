"""Which cluster and program a row gets, and what happens to rows that cannot be predicted."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.accuracy.compare import compare, measure
from pipeloom.accuracy.programs import cluster_of, program_of
from pipeloom.accuracy.rows import read_rows
from pipeloom.catalog import load_cluster, load_software
from pipeloom.errors import UserError

ROW = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")[0]
CLUSTER = load_cluster("dgx-a100")


@pytest.mark.parametrize(
    ("set_name", "attention", "program"),
    [
        ("layouts-2311.05610-main", "flash2", "scaling-2023b"),
        ("layouts-2311.05610-main", "flash1", "scaling-2023a"),
        ("vtrain-multi-node", "fused-softmax", "vtrain-multi"),
        ("nanotron-ultrascale", "flash2", "nanotron"),
        ("my own runs", "flash2", "general"),
        ("my own runs", "plain", "general"),
        ("llm-foundry-2030", "flash2", "fsdp"),
        ("dgxc-30.01-nemo", "flash2", "megatron-core"),
        ("megatron-lm-ci-2026-gb200", "flash2", "megatron-deterministic"),
        ("bigscience-2022-a100", "fused-softmax", "megatron-deepspeed"),
        ("dgxc-24.11-nemo-24.09-h100", "flash2", "megatron-core"),
        ("dgxc-24.11-paxml-h100", "flash2", "xla"),
    ],
)
def test_the_set_and_the_kernel_choose_the_program(set_name, attention, program):
    row = replace(ROW, set_name=set_name, run=replace(ROW.run, attention=attention))
    assert program_of(row)[0] == program


@pytest.mark.parametrize(
    ("device", "cluster"),
    [("a100-sxm-80gb", "dgx-a100"), ("h100-sxm-80gb", "dgx-h100"), ("gb200-nvl72", "gb200-nvl72")],
)
def test_an_unknown_set_gets_the_general_program_and_its_device_with_the_ordinary_network(device, cluster):
    row = replace(ROW, set_name="my own runs", device=device)
    name, program = program_of(row)
    assert name == "general"
    assert cluster_of(row, program).name == cluster


def test_an_unknown_set_with_the_kernel_of_megatron_2021_has_its_facts_and_general_efficiencies():
    early, late = (
        program_of(replace(ROW, set_name="my own runs", run=replace(ROW.run, attention=attention)))
        for attention in ("fused-softmax", "flash2")
    )
    assert early[0] == late[0] == "general"
    assert early[1].efficiency == late[1].efficiency
    facts = load_software("megatron-2021")
    kept = {"name": "general", "cluster": late[1].cluster, "efficiency": late[1].efficiency}
    assert early[1] == replace(facts, **kept) != late[1]


def test_the_device_chooses_the_cluster_and_the_program_decides_between_two():
    program = program_of(replace(ROW, set_name="nanotron-x"))[1]
    assert cluster_of(replace(ROW, device="h100-sxm-80gb"), program).name == "nanotron-h100-efa"
    assert cluster_of(ROW, program).name == "dgx-a100"
    with pytest.raises(UserError, match="no cluster of the catalog has the device 'abacus'"):
        cluster_of(replace(ROW, device="abacus"), program)


def test_the_network_of_a_note_replaces_that_of_the_cluster():
    row = replace(ROW, set_name="my own runs", note="4 x 100 Gb/s RoCE per node")
    usual, slow = (cluster_of(each, program_of(each)[1]) for each in (replace(row, note=""), row))
    assert (usual.name, usual.inter.bytes_per_s, usual.num_adapters) == ("dgx-a100", 200e9, 8)
    assert (slow.name, slow.inter.bytes_per_s, slow.num_adapters) == ("dgx-a100 with 400 Gb/s", 50e9, 4)
    assert (slow.device, slow.intra) == (usual.device, usual.intra)


@pytest.mark.parametrize("note", ["8 x 200 Gb/s", "200 Gb/s per GPU", "1600 Gb/s per node"])
def test_a_note_that_states_the_network_of_the_cluster_changes_nothing(note):
    row = replace(ROW, set_name="my own runs", note=note)
    assert cluster_of(row, program_of(row)[1]) is cluster_of(replace(row, note=""), program_of(row)[1])


def test_measurements_of_another_network_are_left_out():
    row = replace(ROW, set_name="nanotron-x", device="h100-sxm-80gb", note="8 x 100 Gb/s")
    program = program_of(row)[1]
    assert cluster_of(replace(row, note=""), program).bus_curves
    assert not cluster_of(row, program).bus_curves


def test_rows_that_no_family_can_make_are_counted_and_the_others_predicted():
    run = replace(ROW.run, dp=4, pp=8)
    rows = [ROW, *(replace(ROW, run=run, schedule=name) for name in ("chimera", "1f1b", "zb-1p"))]
    rows.append(replace(ROW, run=replace(run, loops=2), schedule="1f1b"))
    answer = compare(rows)
    assert answer.skipped == {
        "no family makes the schedule 'chimera'": 1,
        "no family makes the schedule '1f1b' in this size": 1,
    }
    assert len(answer.outcomes) == 3
    assert answer.to_json()["summary"]["rows"] == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pp": 64, "dp": 1}, "the model has fewer layers than the pipeline has stages"),
        (
            {"global_batch": 1, "micro_batch": 2},
            "the batch has fewer sequences than the replicas have in one micro-batch",
        ),
        ({"tp": 7}, "tp and kv_heads do not divide the heads"),
    ],
)
def test_layouts_that_no_program_runs_are_counted(changes, reason):
    (found,) = compare([replace(ROW, run=replace(ROW.run, **changes), schedule="1f1b")]).skipped
    assert found.startswith(reason)


def test_rows_of_an_unknown_device_are_counted_and_a_given_cluster_predicts_them():
    rows = [ROW, replace(ROW, device="abacus"), replace(ROW, device="abacus")]
    assert compare(rows).skipped == {"no cluster of the catalog has the device 'abacus': give --cluster": 2}
    assert len(compare(rows, CLUSTER).outcomes) == 3


def test_a_precision_that_the_device_has_not_is_counted():
    run = replace(ROW.run, precision="bf16")
    answer = compare([replace(ROW, run=run, device="v100-sxm-32gb")])
    assert answer.skipped == {"the device 'v100-sxm-32gb' has no rate for bf16": 1}


def test_a_model_is_what_its_columns_say_and_its_name_does_not_matter():
    known, renamed = (
        replace(ROW, run=replace(ROW.run, shape=replace(ROW.run.shape, name=n))) for n in ("gpt-1.7b", "x")
    )
    first, second = compare([known, renamed]).outcomes
    assert first.step_time_s == second.step_time_s
    assert set(compare([renamed]).by_set) == {ROW.set_name, f"{ROW.set_name}/x"}


def test_rows_with_only_memory_or_only_a_status_are_measured_by_what_they_have():
    memory = replace(ROW, step_time_s=None, memory_bytes=40e9)
    status = replace(ROW, step_time_s=None)
    out = replace(status, is_ok=False, run=replace(ROW.run, micro_batch=512, recompute="none", dp=1, global_batch=512))
    part = measure(compare([memory, status, out]).outcomes)
    assert (part.rows, part.timed_rows, part.mean_abs_error, part.mean_top1_regret) == (3, 0, None, None)
    assert part.memory_mean_abs_error is not None
    assert part.oom_agreement == 1
    assert measure(compare([memory, status]).outcomes[1:]).memory_mean_abs_error is None


def test_a_program_whose_first_rank_writes_the_memory_is_compared_with_the_first_stage():
    # With one micro-batch the last stage, which has the logits, is fuller than the first.
    run = replace(ROW.run, dp=1, tp=1, pp=2, micro_batch=4, global_batch=4, attention="flash2", precision="bf16")
    row = replace(ROW, set_name="nanotron-x", run=run, schedule="1f1b", device="h100-sxm-80gb")
    program = program_of(row)[1]
    first, fullest = (
        compare([row], None, replace(program, reports_first=is_first)).outcomes[0] for is_first in (True, False)
    )
    assert compare([row]).outcomes[0] == first
    assert first.memory_bytes < fullest.memory_bytes
    assert first.step_time_s == fullest.step_time_s
