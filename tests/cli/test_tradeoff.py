"""``pipeloom tradeoff``: tables, JSON, a picture, and refusals that name everything."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest

from pipeloom.catalog import load_cluster, load_model
from pipeloom.cli import main
from pipeloom.planner.tradeoff import tradeoff

PRICE = load_cluster("dgx-a100").price_per_device_hour
ASKED = (
    *("tradeoff", "--model", "gpt-6.6b", "--cluster", "dgx-a100", "--seq", "1024", "--devices", "16", "64"),
    *("--batch-per-device", "1/2", "2", "--methods", "breadth-first", "1f1b"),
)


def test_json_has_every_point_and_the_question(capsys):
    words = ("--software", "pipeloom", "1f1b=megatron-2021", "--critical-batch", "1000", "--tokens", "1e10")
    assert main([*ASKED, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["methods"] == {"breadth-first": "pipeloom", "1f1b": "megatron-2021"}
    assert (found["tokens"], found["critical_batch"], found["price_per_device_hour"]) == (1e10, 1000, PRICE)
    assert (found["reference_devices"], found["dtype"], found["seq"]) == (16, "bfloat16", 1024)
    assert len(found["points"]) == 8
    for point in found["points"]:
        assert point["num_devices"] == point["tp"] * point["pp"] * point["dp"]
        assert point["tokens"] == pytest.approx(1e10 * (1 + point["global_batch"] / 1000))
        assert point["seconds"] == pytest.approx(point["tokens"] / point["tokens_per_s"])
        assert point["dollars"] == pytest.approx(point["seconds"] / 3600 * point["num_devices"] * PRICE)
    for best in found["best"]:
        seconds = [p["seconds"] for p in found["points"] if p["num_devices"] == best["num_devices"]]
        assert found["points"][best["point"]]["seconds"] == min(seconds)
        assert best["point"] in best["by_method"].values()
    assert found["points"][found["front"][0]]["num_devices"] == 64
    assert found["missing"] == []


def test_tables_name_the_best_and_every_method_and_a_picture_is_drawn(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    picture = tmp_path / "curves.png"
    words = ("--batch-per-device", "1", "2", "--methods", "1f1b", "data-parallel", "--critical-batch-tokens", "1024000")
    assert main([*ASKED[:10], *words, "--deadline", "52w", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "B_crit    1,000 sequences\n" in out
    assert f"tokens    {20 * load_model('gpt-6.6b').parameters:.4g} with small batches" in out
    assert f"${PRICE} per device-hour" in out
    lines = [line.split() for line in out.splitlines()]
    assert [line[0].rstrip("*") for line in lines if line and line[0].rstrip("*") in ("16", "64")] == ["16", "64"] * 2
    assert ["devices", "1f1b", "data-parallel"] in lines
    assert max(map(len, out.splitlines())) <= 100
    assert "- the cheapest training within 364 days: 16 devices of dgx-a100, DP, tp" in out
    # As in a plan, a layout without a pipeline is DP or FSDP.
    assert {line[1] for line in lines if line and line[0] in ("16*", "64*")} <= {"DP", "FSDP", "1f1b"}
    assert "the largest that was tried" in out or "the smallest that was tried" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_default_critical_batch_says_where_it_comes_from(capsys):
    words = ("--devices", "16", "--batch-per-device", "1", "--methods", "1f1b")
    assert main([*ASKED[:7], *words]) == 0
    out = capsys.readouterr().out
    assert "arXiv 2001.08361" in out
    assert "(20 for each parameter, arXiv 2203.15556)" in out
    assert "that was tried" not in out  # it is the only batch


def test_no_fit_and_no_error_is_of_models_with_experts(capsys):
    words = ("--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--seq", "1024", "--devices", "64")
    words = ("--batch-per-device", "1", "--methods", "1f1b", "--deadline", "99w", *words)
    assert main(["tradeoff", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "(20 for each parameter, a fit to models without experts, arXiv 2203.15556)" in out
    assert "(a fit to models without experts, arXiv 2001.08361)" in out
    assert "too short, their mean error, which may be larger for such layouts, make it" in out


def test_every_problem_is_reported_at_once(capsys):
    words = ("--cluster", "dgx-v100", "--devices", "64", "96", "--critical-batch", "0.5", "--tokens", "-1")
    more = (
        "--methods",
        "breadth",
        "1f1b",
        "--software",
        "megatron",
        "gpipe=pipeloom",
        "--batch-per-device",
        "x",
        "1/3",
    )
    assert main(["tradeoff", "--model", "gpt-6", "--seq", "0", *words, *more]) == 2
    message = capsys.readouterr().err
    for text in (
        "there is no model 'gpt-6'",
        "there is no cluster 'dgx-v100': did you mean 'dgx-1-v100'?",
        "there is no software 'megatron'",
        "--software gpipe=pipeloom: expected one of the methods breadth, 1f1b",
        "there is no method 'breadth'",
        "must be multiples of the reference, 64, found 96",
        "found 'x'",
        "0.333333 x 64 = 21.3333",
        "the critical batch must be at least 1 sequence and finite, found 0.5",
        "--tokens must be an amount above 0 such as 1T, 300B or 3e11, found '-1'",
        "--seq must be at least 1, found 0",
    ):
        assert text in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--cluster", "dgx-1-v100", "--max-dollars", "1k"),
            "'dgx-1-v100' has no price_per_device_hour, which the goal",
        ),
        (("--dtype", "float32", "--cluster", "dgx-1-v100", "--price", "0"), "price of a device-hour must be above 0"),
        (("--software", "pipeloom", "nanotron"), "--software takes one program for all methods, found pipeloom, nano"),
        (("--software", "breadth-first=megatron-2021"), "breadth-first: megatron-2021 has no family 'breadth-first'"),
        (("--software", "1f1b=a", "1f1b=b"), "--software takes one program for 1f1b, found a, b"),
        (("--software", "pipeloom", "1f1b=a", "breadth-first=b"), "--software pipeloom has no effect, since each"),
        (("--methods", "1f1b", "gpipe", "1f1b"), "--methods has 1f1b more than once; give each value once"),
        (("--devices", "64", "64"), "--devices has 64 more than once; give each value once"),
        (("--batch-per-device", "1/2", "0.5"), "--batch-per-device has equal values, found 1/2 0.5"),
        (("--critical-batch", "9", "--critical-batch-tokens", "9"), "found both"),
        (("--for", "megatron", "--software", "pipeloom"), "--for megatron and --software both name the program"),
        (("--for", "megatron", "--methods", "gpipe"), "gpipe: Megatron-LM (priced as megatron-core) has no family"),
        (("--for", "torchtitan"), "model.family gpt2: the export to torchtitan supports llama and qwen3 only"),
        (("--plot", "curves.gif"), "expected a file ending in one of .png"),
        (("--model", "gpt-52b", "--budget-s", "1e-9"), "no layout that fits was found in that time: use a larger"),
        (("--model", "gpt-1t"), "no layout of any method fits 16 devices of dgx-a100"),
    ],
)
def test_one_mistake_is_one_clear_message(capsys, words, message):
    assert main([*ASKED, *words]) == 2
    assert message in capsys.readouterr().err


def test_layouts_are_those_that_another_program_can_run(capsys):
    words = (*ASKED[:8], "16", "--batch-per-device", "2", "--for", "megatron")
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["launcher"] == "megatron"
    assert found["methods"] == dict.fromkeys(("depth-first", "1f1b", "data-parallel"), "megatron-core")
    for point in found["points"]:
        # Megatron-LM interleaves whole groups only.
        assert point["loops"] == 1 or point["num_microbatches"] % point["pp"] == 0
    assert main(list(words)) == 0
    assert "program   Megatron-LM (only what it can run, at the measured speed of megatron-core)" in (
        capsys.readouterr().out
    )


def test_what_a_time_limit_cut_short_is_a_sentence(capsys, monkeypatch):
    def cut(inputs, progress, budget_s):
        assert budget_s == 9
        return replace(tradeoff(inputs, progress), unproved=(("1f1b", Fraction(2)),))

    monkeypatch.setattr("pipeloom.cli.tradeoff.tradeoff", cut)
    words = (*ASKED[:10], "--batch-per-device", "1", "2", "--methods", "1f1b", "--budget-s", "9")
    assert main(list(words)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "the time limit ended 1 of the searches for 2 methods and batches; a larger --budget-s may find faster layouts"
        in out
    )
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unproved"] == [{"method": "1f1b", "batch_per_device": 2.0}]


def test_a_goal_chooses_over_methods_batches_and_cluster_sizes(capsys):
    assert main([*ASKED, "--tokens", "10B", "--deadline", "1d", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["goal"]["objective"]) == (1e10, "cost")
    best = found["points"][found["goal"]["point"]]
    assert best["dollars"] == min(one["dollars"] for one in found["points"] if one["seconds"] <= 86400)
    few = (*ASKED[:10], "--batch-per-device", "2", "--methods", "1f1b")
    assert main([*few, "--tokens", "10B", "--max-dollars", "0.1", "--deadline", "2w"]) == 1
    assert "nothing is within 14 days and for at most $0.1: the fastest training takes" in capsys.readouterr().out


def test_without_a_price_device_hours_are_the_cost(capsys, tmp_path):
    words = [word.replace("dgx-a100", "dgx-1-v100") for word in ASKED[:10]]
    words += ["--batch-per-device", "2", "--methods", "1f1b", "--tokens", "10B", "--deadline", "52w"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    points, best = found["points"], found["points"][found["goal"]["point"]]
    assert {point["dollars"] for point in points} == {None}
    assert best["device_hours"] == min(point["device_hours"] for point in points)
    assert best["device_hours"] == pytest.approx(best["seconds"] / 3600 * best["num_devices"])
    assert [points[number]["num_devices"] for number in found["front"]] == [64, 16]
    picture = tmp_path / "curves.svg"
    assert main([*words, "--plot", str(picture)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "dgx-1-v100 without a price (--price)" in out
    assert "Days and device-hours of each method" in out
    assert "$" not in out
    assert "- the training of the fewest device-hours within 364 days: 16 devices of dgx-1-v100" in out
    assert ">device-hours<" in picture.read_text()


def test_wrong_amounts_of_goals_are_one_message(capsys):
    assert main([*ASKED, "--tokens", "10Q", "--deadline", "30", "--max-dollars", "-1k"]) == 2
    printed = capsys.readouterr().err
    assert "--tokens must be an amount above 0 such as 1T, 300B or 3e11, found '10Q'" in printed
    assert "--deadline must be an amount above 0 such as 30d, 12h or 6w, found '30'" in printed
