"""``pipeloom schedule``: the worked example of the paper's figure, the formats, the refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.cli import main

# 16 layers over 4 ranks, 8 micro-batches; a layer's forward is 1 unit, its backward 2. Without loops a stage has
# four layers, with 4 loops it has one.
WITHOUT_LOOPS = ["--pp", "4", "--num-microbatches", "8", "--forward", "4", "--backward", "8"]
WITH_LOOPS = ["--pp", "4", "--num-microbatches", "8", "--loops", "4", "--forward", "1", "--backward", "2"]
EXAMPLE = {
    "gpipe": (WITHOUT_LOOPS, 132, 0.375, [8, 8, 8, 8]),
    "1f1b": (WITHOUT_LOOPS, 132, 0.375, [4, 3, 2, 1]),
    "depth-first": (WITH_LOOPS, 105, 0.09375, [19, 17, 15, 13]),
    "breadth-first": (WITH_LOOPS, 105, 0.09375, [32, 32, 32, 32]),
}
FINAL = {
    "gpipe": [132, 124, 116, 108],
    "1f1b": [132, 124, 116, 108],
    "depth-first": [105 - 2 * layer for layer in range(16)],
    "breadth-first": [105 - 2 * (layer % 4) - 16 * (layer // 4) for layer in range(16)],
}


def schedule(capsys, *words):
    assert main(["schedule", *words]) == 0
    return capsys.readouterr().out


def schedule_json(capsys, *words):
    return json.loads(schedule(capsys, *words, "--json"))


def refusal(capsys, *words):
    assert main(["schedule", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pipeloom schedule: ")
    return captured.err


@pytest.mark.parametrize("family", EXAMPLE)
def test_the_worked_example_is_exact(capsys, family):
    words, makespan, bubble, peaks = EXAMPLE[family]
    answer = schedule_json(capsys, family, *words)
    assert answer["makespan"] == makespan
    assert answer["bubble_overhead"] == bubble
    assert answer["bubble_fraction"] == pytest.approx(1 - 96 / makespan)
    assert answer["peak_stage_inputs"] == peaks
    assert answer["gradients_final_at"] == FINAL[family]
    assert answer["num_microbatches"] == 8
    assert answer["level"] == "compute"


def test_breadth_first_gradients_become_final_every_sixteen_units_on_a_rank(capsys):
    final = schedule_json(capsys, "breadth-first", *WITH_LOOPS)["gradients_final_at"]
    assert [final[stage] for stage in (12, 8, 4, 0)] == [57, 73, 89, 105]
    assert [final[stage] for stage in (15, 11, 7, 3)] == [51, 67, 83, 99]


ROWS = {
    ("gpipe", 0): "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0B0 0B1 0B2 0B3 0B4 0B5 0B6 0B7",
    ("1f1b", 0): "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7",
    ("1f1b", 3): "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7",
    ("breadth-first", 0): (
        "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 4F0 4F1 4F2 4F3 4F4 4F5 4F6 4F7 "
        "8F0 8F1 8F2 8F3 8F4 8F5 8F6 8F7 12F0 12F1 12F2 12F3 12F4 12F5 12F6 12F7 "
        "12B0 12B1 12B2 12B3 12B4 12B5 12B6 12B7 8B0 8B1 8B2 8B3 8B4 8B5 8B6 8B7 "
        "4B0 4B1 4B2 4B3 4B4 4B5 4B6 4B7 0B0 0B1 0B2 0B3 0B4 0B5 0B6 0B7"
    ),
    ("depth-first", 0): (
        "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 8F0 8F1 8F2 8F3 12F0 12F1 12F2 12F3 0F4 0F5 "
        "0F6 12B0 0F7 12B1 4F4 12B2 4F5 12B3 4F6 8B0 4F7 8B1 8F4 8B2 8F5 8B3 8F6 4B0 8F7 4B1 12F4 4B2 12F5 4B3 "
        "12F6 0B0 12F7 0B1 0B2 0B3 12B4 12B5 12B6 12B7 8B4 8B5 8B6 8B7 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7"
    ),
    ("depth-first", 3): (
        "3F0 3F1 3F2 3F3 7F0 7F1 7F2 7F3 11F0 11F1 11F2 11F3 15F0 15B0 15F1 15B1 15F2 15B2 15F3 15B3 "
        "3F4 11B0 3F5 11B1 3F6 11B2 3F7 11B3 7F4 7B0 7F5 7B1 7F6 7B2 7F7 7B3 "
        "11F4 3B0 11F5 3B1 11F6 3B2 11F7 3B3 15F4 15B4 15F5 15B5 15F6 15B6 15F7 15B7 "
        "11B4 11B5 11B6 11B7 7B4 7B5 7B6 7B7 3B4 3B5 3B6 3B7"
    ),
}


@pytest.mark.parametrize(("family", "rank"), ROWS)
def test_the_rows_of_the_worked_example_are_those_of_the_papers(capsys, family, rank):
    answer = schedule_json(capsys, family, *EXAMPLE[family][0])
    assert answer["rows"][rank] == ROWS[family, rank].split()


def test_the_installed_command_prints_the_worked_example():
    installed = Path(sys.executable).with_name("pipeloom")
    command = [installed, "schedule", "gpipe", *WITHOUT_LOOPS, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    answer = json.loads(done.stdout)
    assert (answer["makespan"], answer["bubble_overhead"]) == (132, 0.375)
    assert done.stderr == ""


def test_text_for_people_names_the_bubble_and_is_a_schedule_file(capsys, tmp_path):
    text = schedule(capsys, "1f1b", *WITHOUT_LOOPS)
    assert ROWS["1f1b", 0] in text.splitlines()
    assert "# makespan           132" in text
    assert "0.375 (idle / ideal)" in text
    assert "# peak stage inputs  4 3 2 1" in text
    assert "# gradients final at 132 124 116 108" in text
    file = tmp_path / "saved.txt"
    file.write_text(text, encoding="utf-8")
    again = schedule_json(capsys, str(file), "--forward", "4", "--backward", "8")
    assert again == schedule_json(capsys, "1f1b", *WITHOUT_LOOPS)


def test_an_exported_csv_file_is_read_back_with_its_communication(capsys, tmp_path):
    words = ["breadth-first", "--pp", "3", "--loops", "2", "--num-microbatches", "4", "--communication"]
    file = tmp_path / "saved.csv"
    file.write_text(schedule(capsys, *words, "--format", "torch-csv"), encoding="utf-8")
    again, direct = schedule_json(capsys, str(file)), schedule_json(capsys, *words)
    for row in again["rows"]:
        row[:] = [action for action in row if "REDUCE_GRAD" not in action]  # what PyTorch's format adds
    assert again.pop("num_reductions") == [2] * 3
    assert direct.pop("num_reductions") == [0] * 3
    assert again == direct
    assert again["level"] == "communication"


def test_transfers_cost_breadth_first_two_hops_for_each_boundary_between_ranks(capsys):
    words = ["breadth-first", "--pp", "4", "--loops", "4", "--num-microbatches", "8"]
    assert schedule_json(capsys, *words, "--transfer", "0.5")["makespan"] == 105 + 2 * 3 * 0.5


SHARDED = ["--pp", "4", "--loops", "4", "--num-microbatches", "8", "--reduce-grad", "--gather", "8", "--reduce", "8"]


@pytest.mark.parametrize(
    ("unshard", "counts", "makespan"), [("2", [6] * 4, 121), ("1", [7] * 4, 169), ("all", [4] * 4, 121)]
)
def test_gathers_and_reductions_are_added_counted_and_priced(capsys, unshard, counts, makespan):
    answer = schedule_json(capsys, "breadth-first", *SHARDED, "--unshard", unshard)
    assert answer["num_unshards"] == counts
    assert answer["num_reductions"] == [4] * 4
    assert answer["makespan"] == makespan
    assert answer["level"] == "communication"
    assert any(answer["exposed_data_parallel"])


def test_text_for_people_counts_gathers_and_reductions_where_there_are_any(capsys):
    text = schedule(capsys, "depth-first", *SHARDED, "--unshard", "1", "--prefetch", "0", "--gradient-buffers", "1")
    assert "# weight gathers     31 " in text
    assert "# reductions         8 8 8 8 (by rank)" in text
    assert "# exposed for them   " in text
    assert "gathers" not in schedule(capsys, "depth-first", "--loops", "4")


def test_a_tied_matrix_is_added_and_costs_what_breadth_first_cannot_hide(capsys):
    sizes = ["breadth-first", "--pp", "4", "--loops", "2", "--num-microbatches", "8", "--tied"]
    found = [schedule_json(capsys, *sizes, seconds) for seconds in ("0", "11", "14")]
    assert [one["makespan"] for one in found] == [57, 57, 60]
    assert found[0]["rows"][3][0] == "7RECV_TIED"
    assert {"0SEND_TIED", "0RECV_TIED_GRAD"} <= set(found[0]["rows"][0])


def test_forward_only_has_no_final_gradients(capsys):
    words = ["forward-only", "--pp", "2", "--loops", "2", "--num-microbatches", "2"]
    answer = schedule_json(capsys, *words)
    assert answer["gradients_final_at"] == [None] * 4
    assert answer["peak_stage_inputs"] == [1, 1]
    assert "gradients final" not in schedule(capsys, *words)


def test_the_group_size_and_the_placement_reach_the_schedule(capsys):
    hybrid = schedule_json(capsys, "hybrid", "--pp", "2", "--loops", "2", "--group-size", "4")
    assert hybrid["rows"][1][:8] == ["1F0", "1F1", "1F2", "1F3", "3F0", "3B0", "3F1", "3B1"]
    v = schedule_json(capsys, "breadth-first", "--pp", "2", "--loops", "2", "--placement", "v")
    assert v["rank_by_stage"] == [0, 1, 1, 0]


def test_a_picture_is_drawn_beside_the_text(capsys, tmp_path):
    file = tmp_path / "schedule.png"
    schedule(capsys, "1f1b", "--pp", "2", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


REFUSALS = {
    "an infinite cost is refused": (["gpipe", "--forward", "inf"], "--forward must be above 0 and finite, found inf"),
    "a cost of zero is refused": (["gpipe", "--forward", "0"], "--forward must be above 0, found 0"),
    "a cost that is no number is refused": (["gpipe", "--backward", "nan"], "--backward must be above 0, found nan"),
    "a negative transfer is refused": (["gpipe", "--transfer", "-1"], "--transfer must be at least 0, found -1"),
    "no receive buffer is refused": (
        ["gpipe", "--communication", "--receive-buffers", "0"],
        "receive_buffers must be at least 1, found 0",
    ),
    "no stage resident is refused": (["gpipe", "--unshard", "0"], "residency must be at least 1, found 0"),
    "a negative cost of a gather is refused": (["gpipe", "--gather", "-1"], "--gather must be at least 0, found -1"),
    "a gather that is not there is refused": (["gpipe", "--gather", "1"], "the schedule has no UNSHARD; add --unshard"),
    "a reduction that is not there is refused": (["gpipe", "--reduce", "1"], "has no REDUCE_GRAD; add --reduce-grad"),
    "a negative cost of a tied matrix is refused": (["gpipe", "--tied", "-1"], "--tied must be at least 0, found -1"),
    "a tied matrix on one rank is refused": (["gpipe", "--pp", "1", "--tied", "1"], "--tied has no effect"),
    "prefetch of nothing is refused": (["gpipe", "--prefetch", "2"], "--prefetch has no effect without --unshard"),
    "buffers for nothing are refused": (["gpipe", "--gradient-buffers", "2"], "has no effect without --reduce-grad"),
}


@pytest.mark.parametrize("title", REFUSALS)
def test_wrong_input_ends_with_status_two_and_a_reason(capsys, title):
    words, reason = REFUSALS[title]
    assert reason in refusal(capsys, *words)


def test_all_problems_are_reported_at_once(capsys):
    message = refusal(capsys, "gpipe", "--pp", "0", "--num-microbatches", "0", "--placement", "ring")
    assert "3 problems" in message
    message = refusal(capsys, "gpipe", "--forward", "0", "--backward", "-2")
    assert "2 problems" in message


def test_a_file_with_a_broken_schedule_is_refused_with_the_rule_and_the_place(capsys, tmp_path):
    file = tmp_path / "broken.txt"
    file.write_text("0F0 0B0\n1B0 1F0\n", encoding="utf-8")
    message = refusal(capsys, str(file))
    assert "rule 'forward-before-backward' at rank 1, slot 0" in message
    assert "> rank 1: >1B0< 1F0" in message


def test_a_file_that_is_not_text_is_refused(capsys, tmp_path):
    file = tmp_path / "binary.txt"
    file.write_bytes(b"\xff\xfe\xfa")
    assert "cannot read the schedule" in refusal(capsys, str(file))


def test_an_overlong_name_is_refused_like_any_unknown_family(capsys):
    assert "there is no schedule" in refusal(capsys, "x" * 300)


def test_help_lists_every_family(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["schedule", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for family in ("gpipe", "1f1b", "depth-first", "breadth-first", "hybrid", "forward-only"):
        assert family in text


def test_an_unknown_command_ends_with_status_two(capsys):
    assert main(["scheduel"]) == 2
    assert "there is no command 'scheduel'; did you mean 'schedule'?\n" in capsys.readouterr().err
    assert main(["zebra"]) == 2
    assert "there is no command 'zebra'\n" in capsys.readouterr().err


def test_no_command_shows_the_usage_and_ends_with_status_two(capsys):
    assert main([]) == 2
    assert "usage: pipeloom" in capsys.readouterr().out


def test_balance_pairs_the_ranks_and_says_what_they_hold_before_and_after(capsys, tmp_path):
    words = ["1f1b", "--pp", "8", "--num-microbatches", "64", "--balance"]
    plain, answer = schedule_json(capsys, *words[:-1]), schedule_json(capsys, *words)
    assert (plain["peak_held"], plain["partners"]) == ([8, 7, 6, 5, 4, 3, 2, 1], None)
    assert answer["peak_held"] == [5, 5, 5, 5, 4, 5, 5, 5]
    assert answer["peak_stage_inputs"] == plain["peak_stage_inputs"]
    assert answer["partners"] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert answer["num_evictions"] == [30, 24, 15, 0, 0, 0, 0, 0]
    assert answer["makespan"] == plain["makespan"]
    lines = schedule(capsys, *words, "--plot", str(tmp_path / "step.png")).splitlines()
    assert "# peak stage inputs  8 7 6 5 4 3 2 1 (by rank)" in lines
    assert "# peak with moves    5 5 5 5 4 5 5 5 (by rank)" in lines
    assert "# delay by moves     0" in lines
    assert (tmp_path / "step.png").stat().st_size > 10000


def test_offload_keeps_a_budget_alone_and_behind_balance(capsys):
    words = ["breadth-first", "--pp", "4", "--loops", "2", "--num-microbatches", "8", "--offload", "--budget", "10"]
    answer = schedule_json(capsys, *words)
    assert (answer["peak_held"], answer["num_offloads"], answer["partners"]) == ([10] * 4, [6] * 4, None)
    words = ["1f1b", "--pp", "4", "--num-microbatches", "8", "--balance", "--move", "0.5", "--budget"]
    answer = schedule_json(capsys, *words, "3", "--offload")
    assert (max(answer["peak_held"]), sum(answer["num_offloads"])) == (3, 0)
    assert schedule_json(capsys, *words, "4")["num_evictions"] == [0] * 4


def test_a_file_that_moves_says_so(capsys, tmp_path):
    file = tmp_path / "saved.txt"
    words = ["1f1b", "--pp", "4", "--num-microbatches", "8"]
    file.write_text(balanced := schedule(capsys, *words, "--balance"), encoding="utf-8")
    assert "# partners           3 2 1 0 (by rank)" in schedule(capsys, str(file)).splitlines()
    file.write_text("\n".join(line for line in balanced.splitlines() if " = " not in line), encoding="utf-8")
    lines = schedule(capsys, str(file)).splitlines()
    assert "# partners           unknown" in lines
    assert "# evictions          3 0 0 0 (by rank)" in lines
    assert "# peak with moves    3 3 2 1 (by rank): without what ranks accept from partners" in lines
    assert not any("delay by moves" in line for line in lines)
    slow = [schedule_json(capsys, str(file), "--move", seconds)["makespan"] for seconds in ("0", "20")]
    assert slow[0] < slow[1]
    file.write_text(schedule(capsys, *words, "--offload", "--budget", "3"), encoding="utf-8")
    lines = schedule(capsys, str(file)).splitlines()
    assert "# partners           none" in lines
    assert "# offloads           3 0 0 0 (by rank)" in lines
    assert "# peak with moves    3 3 2 1 (by rank)" in lines
    file.write_text(schedule(capsys, *words), encoding="utf-8")
    assert "--move has no effect: the schedule has no EVICT or OFFLOAD" in refusal(capsys, str(file), "--move", "2")


def test_moves_that_make_no_sense_are_refused_together(capsys):
    message = refusal(capsys, "1f1b", "--budget", "-1", "--move", "-2")
    assert "--budget must be at least 0, found -1" in message
    assert "--move must be at least 0, found -2" in message
    assert "--budget has no effect without --balance or --offload" in message
    assert "--move has no effect without --balance or --offload" in message
    assert "--offload needs --budget" in refusal(capsys, "1f1b", "--offload")
    message = refusal(capsys, "1f1b", "--offload", "--budget", "1")
    assert "the budget cannot be kept" in message
    assert "pipeline rank 0 still holds 2, 1 more than its 1" in message


def test_slices_share_the_costs_of_a_micro_batch(capsys, tmp_path):
    answer = schedule_json(capsys, "1f1b", *WITHOUT_LOOPS, "--slices", "4")
    assert answer["bubble_overhead"] == pytest.approx(0.375 / 4)
    assert answer["peak_stage_inputs"] == [2, 2, 2, 1]
    file = tmp_path / "whole.txt"
    file.write_text("0F0 0B0\n")
    assert schedule_json(capsys, str(file), "--slices", "2")["rows"] == [["0F0", "0F0.1", "0B0.1", "0B0"]]
    file.write_text("0F0 0OFFLOAD0 0F0.1 0RELOAD0 0B0.1 0B0\n")  # 0.5 forward, 4 away, 4 back, 1 backward
    assert schedule_json(capsys, str(file), "--move", "8")["makespan"] == 9.5
    assert main(["schedule", "1f1b", "--slices", "0"]) == 2
    assert "--slices must be at least 1, found 0" in capsys.readouterr().err


def test_stages_that_visit_the_device(capsys, tmp_path):
    sizes = ["breadth-first", "--pp", "1", "--loops", "8", "--resident", "2"]
    found = schedule_json(capsys, *sizes, "--stage-swap", "8")
    assert found["num_swaps_in"] == [14]
    assert found["makespan"] == 8 * 8 * 3 + 2 * 8  # the first load and the last store
    updated = schedule(capsys, *sizes, "--update", "in-the-next-step", "--stage-swap", "1")
    assert "0SWAP_IN 1SWAP_IN 0UPDATE 0F0" in updated
    assert "stages swapped in  14 (by rank)" in updated
    file = tmp_path / "visits.txt"
    file.write_text(updated, encoding="utf-8")
    assert "stages swapped in  14 (by rank)\n" in schedule(capsys, str(file), "--stage-swap", "1")
    file.write_text("\n".join(line for line in updated.splitlines() if " = " not in line), encoding="utf-8")
    again = schedule(capsys, str(file), "--stage-swap", "1")
    assert "stages swapped in  14 (by rank): room unknown, so that none waits for it" in again
    file.write_text("0F0 0B0\n", encoding="utf-8")
    assert "--stage-swap has no effect: the schedule has no SWAP_IN" in refusal(capsys, str(file), "--stage-swap", "1")
    assert "--stage-swap has no effect without --resident" in refusal(capsys, "gpipe", "--stage-swap", "1")
    assert "--stage-swap must be at least 0, found -1" in refusal(capsys, *sizes, "--stage-swap", "-1")


LARGE = ["breadth-first", "--pp", "16", "--loops", "4", "--num-microbatches", "32"]


def test_a_schedule_that_no_screen_shows_is_summed_up_and_written_whole_when_text_is_wanted(capsys):
    summary, whole = schedule(capsys, *LARGE), schedule(capsys, *LARGE, "--format", "text")
    assert "4,096 actions on 16 ranks, more than a screen shows; --format text > FILE writes them all" in summary
    assert len(summary) < 2000 < 20_000 < len(whole)
    assert "0F0 0F1 0F2" in whole
    assert "0F0 0F1 0F2" not in summary
    (line,) = (line for line in summary.splitlines() if "gradients final at" in line)
    (every,) = (line for line in whole.splitlines() if "gradients final at" in line)
    assert line.split(" ... ")[0] == every[: len(line.split(" ... ")[0])]
    assert line.endswith("(by stage)")
    assert len(every.split()) == 64 + len(["#", "gradients", "final", "at", "(by", "stage)"])


def test_a_picture_is_drawn_and_its_place_is_printed_last(capsys, tmp_path):
    file = tmp_path / "large.png"
    assert schedule(capsys, *LARGE, "--plot", str(file)).splitlines()[-1].split() == ["#", "picture", str(file)]
    assert file.exists()
    assert main(["schedule", "1f1b", "--pp", "2", "--json", "--plot", str(file)]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert str(file) in captured.err


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "breadth-first", "depth-first", "zb-v", "v-min"])
def test_memory_is_that_of_families_in_its_unit(capsys, name):
    assert main(["families", "--json"]) == 0
    line = next(one for one in json.loads(capsys.readouterr().out) if one["name"] == name)
    words = ["schedule", name, "--loops", str(line["loops"])]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == pytest.approx(line["memory"])
    assert main(words) == 0
    (printed,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("# memory ")]
    assert printed.endswith("(by rank), in units of one micro-batch's activations on all stages of a rank")
    assert main(["families"]) == 0
    assert "in units of one micro-batch's activations on all stages of a rank" in " ".join(
        capsys.readouterr().out.split()
    )


def test_what_is_wrong_with_a_file_names_it(capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("0F0 0X0\n")
    assert f"{tmp_path / 'mine.txt'}: row 0, cell 1: '0X0' is no action" in refusal(capsys, str(tmp_path / "mine.txt"))


def test_a_run_file_in_place_of_a_family_names_the_flag(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("layout.pp = 2\n")
    assert main(["schedule", str(file)]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [f"  - {file} is a run file by its name; write --run {file}"]


def test_all_costs_that_a_schedule_does_not_use_are_one_message(capsys):
    message = refusal(capsys, "1f1b", "--gather", "1", "--reduce", "1", "--weight", "0.5")
    for name in ("--gather", "--reduce", "--weight"):
        assert f"{name} has no effect: the schedule has no " in message


@pytest.mark.parametrize(("first", "words"), [("breadth-first", ["--loops", "4"]), ("zb-h1", [])])
def test_a_schedule_beside_another_has_the_same_work_for_each_rank(capsys, tmp_path, first, words):
    file = tmp_path / "both.svg"
    out = schedule(capsys, first, *words, "--plot", str(file), "--beside", "1f1b")
    own, beside = (
        schedule(capsys, *one).rstrip() for one in ([first, *words], ["1f1b", *(WITHOUT_LOOPS if words else [])])
    )
    assert out == f"{own}\n\n{beside}\n# picture            {file}\n"
    headlines = [text.splitlines()[0].removeprefix("# ") for text in (own, beside)]
    assert all(headline in file.read_text() for headline in headlines)


def test_loops_are_for_the_schedule_that_takes_them_and_by_default_two(capsys, tmp_path):
    words = ["--plot", str(tmp_path / "both.svg"), "--beside", "breadth-first"]
    assert "16 stages on 4 pipeline ranks" in schedule(capsys, "1f1b", "--loops", "4", *words)
    assert "8 stages on 4 pipeline ranks" in schedule(capsys, "1f1b", *words)
    assert schedule(capsys, "breadth-first") == schedule(capsys, "breadth-first", "--loops", "2")
    assert schedule(capsys, "breadth-first") != schedule(capsys, "gpipe").replace("gpipe", "breadth-first")
    for command in ("schedule", "train", "simulate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "Virtual stages on each pipeline rank [2 or 1]" in capsys.readouterr().out
    assert "1f1b runs one stage on each rank" in refusal(capsys, "1f1b", "--loops", "4", *words[:3], "gpipe")


@pytest.mark.parametrize(("first", "beside"), [("1f1b", "breadth-first"), ("breadth-first", "1f1b")])
def test_the_legend_of_two_schedules_has_the_stages_of_the_one_with_several(capsys, tmp_path, first, beside):
    file = tmp_path / "both.svg"
    schedule(capsys, first, "--loops", "4", "--plot", str(file), "--beside", beside)
    assert ">stages 12 to 15<" in file.read_text()


def test_a_picture_has_the_time_of_messages_in_its_title_and_draws_none(capsys, tmp_path):
    file = tmp_path / "one.svg"
    schedule(capsys, "1f1b", "--transfer", "0.5", "--plot", str(file))
    assert "forward 1, backward 2, transfer 0.5; bubble" in file.read_text()
    err = refusal(capsys, "1f1b", "--communication", "--plot", str(file))
    assert "--communication adds messages, which --plot does not draw" in err


def test_a_schedule_beside_another_that_cannot_be_drawn_is_refused(capsys):
    err = refusal(capsys, "--beside", "hybrd")
    assert "--beside has no effect without --plot" in err
    assert "--beside compares two families" in err
    assert "did you mean 'hybrid'?" in err
