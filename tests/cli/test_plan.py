"""``pipeloom plan``: an answer for people and one for programs, a run that trains, and help with wrong questions."""

import json
import re
import shlex
import signal
import time
import tomllib
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from pipeloom.catalog import load_cluster
from pipeloom.cli import main, plan_each
from pipeloom.cli.plan_layouts import settings_words
from pipeloom.cli.plan_progress import PlanProgress
from pipeloom.cli.run_config import parse_config
from pipeloom.cli.train import COMMAND
from pipeloom.config import hyperparameter_problems, unset
from pipeloom.config.file import read_run_file
from pipeloom.data.tokenizer import ByteTokenizer
from pipeloom.export.hand_over import TARGETS
from pipeloom.planner.choice import SIMPLER
from pipeloom.planner.plan import make_question, plan

MODEL = """
name = "small"
layers = 6
hidden = 1024
heads = 8
ffn = 4096
family = "gpt2"
vocab = 32000
tied = false
"""


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""A config.json."""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(MODEL)
    return str(path)


def words(model, **changes):
    given = {"cluster": "dgx-1-v100", "devices": 4, "global-batch": 8, "seq": 512, "dtype": "float16"} | changes
    flags = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    return ["plan", "--model", model, *flags]


def test_a_pipeline_says_from_which_bandwidth_and_width_on_its_traffic_does_not_matter(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(words(model, pp=2)) == 0
    out = " ".join(capsys.readouterr().out.split())
    enough = r"(it matters below|it stops mattering from) [\d.]+ GB/s (inside|between) nodes \(now [\d.]+\), or "
    width = r"(width [\d,]+ \(now 1,024\)|no width below 65,536)"
    assert re.search(rf"between its stages: .* a message, .* of a stage's forward; {enough}{width}", out)


def test_the_answer_for_people(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(words(model)) == 0
    out = capsys.readouterr().out
    headings = ("best layouts", "is the fastest", "What would change the answer", "Expected error")
    assert all(part in out for part in (*headings, "so the error is unknown", "MFU"))
    assert "$/1e9" not in out  # nobody publishes a price for these machines
    pasted = out[out.index("\n  pipeloom plan ") :].replace("\\\n", "")
    assert shlex.split(pasted) == ["pipeloom", *words(model), "--out", "planned"]


def test_for_any_program_the_table_has_the_best_layout_of_each(capsys):
    llama = ["plan", "--model", "llama-13b", "--cluster", "dgx-h100", "--devices", "8", "--global-batch", "8"]
    given = [*llama, "--seq", "2048", "--micro-batch", "1", "--for"]
    assert main([*given, "any", "--tokens", "1T"]) == 0
    out = capsys.readouterr().out
    assert "days, price: of 1e+12 tokens" in out
    rows = [line.split()[0] for line in out.splitlines() if line.startswith(("pipeloom ", "megatron ", "torchtitan "))]
    assert rows == ["pipeloom", "megatron", "torchtitan"]
    assert "measured steps of megatron-core" in out
    assert "measured steps of fsdp" in out
    assert main([*given, "megatron", "--no-explain"]) == 0
    out = capsys.readouterr().out
    assert "Next: write start files of Megatron-LM for row 1." in out
    assert out.endswith("--export start\n")
    assert main([*given, "any", "--out", "planned"]) == 2
    assert "--out writes the layout of one program on one number of devices, found 3" in capsys.readouterr().err
    assert main([*given, "megatron", "--software", "fsdp"]) == 2
    assert "both name the program" in capsys.readouterr().err


def test_for_any_program_one_that_cannot_train_the_model_is_named(model, capsys):
    assert main([*words(model), "--for", "any", "--json"]) == 0
    answers = {one["question"]["launcher"]: one for one in json.loads(capsys.readouterr().out)["answers"]}
    assert answers["megatron"]["layouts"]
    for one in (*answers["megatron"]["layouts"], *answers["pipeloom"]["layouts"]):
        # Also where the program divides the layers evenly.
        layers = one["layers_by_stage"]
        assert (len(layers), sum(layers)) == (
            one["pp"] * one["loops"],
            answers["pipeloom"]["question"]["model"]["layers"],
        )
    reason = "model.family gpt2: the export to torchtitan supports llama and qwen3 only"
    assert answers["torchtitan"]["refused"][1:] == [reason]


def test_in_100_columns_the_table_has_sharding_memory_and_price(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*words(model, cluster="dgx-a100", dtype="bfloat16"), "--no-explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (header,) = (line for line in lines if " micro " in line and " schedule " in line)
    assert all(f" {title}" in header for title in ("sharded", "recomp", "MFU", "GB", "$/1e9", "bubble", "exposed"))
    assert max(map(len, lines[: lines.index(header) + 11])) <= 100
    assert any(" DP " in line or " FSDP " in line for line in lines)


def test_in_100_columns_several_sizes_and_programs_have_the_cells_of_one(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    command = [*words(model, cluster="dgx-a100", dtype="bfloat16"), *SMALL, "--pp", "1", "--shards", "optimizer"]
    columns = ("tp", "pp", "dp", "micro", "schedule", "sharded", "step", "MFU", "GB", "$/1e9")
    found = []
    for name, more in {"1": (), "4": ("--devices", "2", "4"), "pipeloom": ("--for", "any")}.items():
        assert main([*command, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        (head,) = (number for number, line in enumerate(lines) if " micro " in line and " schedule " in line)
        titles = [title for title in lines[head].split() if title != "ms"]
        (cells,) = (line.split() for line in lines[head + 1 : head + 4] if line.split()[0].strip("~") == name)
        # From the right, since names have no title in the table of one.
        cell_of = dict(zip(titles[::-1], cells[::-1], strict=False))
        found.append([cell_of[title] for title in columns])
    assert found[0] == found[1] == found[2]
    assert found[0][4:6] == ["DP", "optim"]


@pytest.mark.parametrize(("seq", "is_much"), [(512, False), (32768, True)])
def test_where_attention_is_a_large_part_of_the_flops_mfu_counts_all_scores_by_the_legend(model, capsys, seq, is_much):
    given = words(model, cluster="dgx-a100", seq=seq, pp=1, tp=2, **{"global-batch": 2, "dtype": "bfloat16"})
    assert main([*given, "--no-explain"]) == 0
    found = re.findall(
        r"MFU: with all scores of attention, (\d+)% of its FLOPs", " ".join(capsys.readouterr().out.split())
    )
    # 12 L H T beside 6 N, with 6 layers of 12 H^2 and two matrices of the vocabulary.
    attention = 12 * 6 * 1024 * seq / (12 * 6 * 1024 * seq + 6 * (6 * 12 * 1024**2 + 2 * 32000 * 1024))
    assert found == ([f"{100 * attention:.0f}"] if is_much else [])


def test_a_run_file_with_settings_that_were_filled_in_is_not_replaced(model, tmp_path, capsys):
    command = [*words(model, cluster="dgx-a100", dtype="bfloat16"), "--no-explain", "--out", str(tmp_path / "planned")]
    assert main(command) == 0
    assert main(command) == 0  # the same again
    file = tmp_path / "planned" / "run.toml"
    file.write_text(filled := file.read_text() + "# filled in\n")
    capsys.readouterr()
    assert main(command) == 2
    assert f"{file} exists and is not the run of this layout; move it" in capsys.readouterr().err
    assert file.read_text() == filled


def test_a_code_of_messages_that_the_written_layout_lacks_is_named(model, tmp_path, capsys):
    command = [*words(model, cluster="dgx-a100", dtype="bfloat16"), "--no-explain", "--boundary", "int8"]
    left_out = "layout.boundary int8 is left out: this layout has no messages between pipeline ranks"
    for pp, is_named in (("1 4", True), ("4", False)):
        assert main([*command, "--pp", *pp.split(), "--out", str(tmp_path / pp)]) == 0
        layout = read_run_file(tmp_path / pp / "run.toml")[0].layout
        assert (layout.boundary is None) == (layout.pp == 1) == is_named
        assert (left_out in capsys.readouterr().out) == is_named


def test_tokens_are_the_steps_of_the_written_run_whatever_the_models_recipe_has(tmp_path, capsys):
    given = ["plan", "--model", "llama-13b", "--cluster", "dgx-h100", "--devices", "16", "--global-batch", "64", *SMALL]
    given += ["--seq", "2048", "--pp", "4", "--tokens", "1B"]
    assert main([*given, "--out", str(tmp_path / "met")]) == 0
    assert read_run_file(tmp_path / "met" / "run.toml")[0].training.steps == ceil(1e9 / (64 * 2048))
    capsys.readouterr()
    assert main([*given, "--out", str(tmp_path / "late"), "--deadline", "1h"]) == 1
    assert "nothing is written: the layout does not meet the goal" in capsys.readouterr().out
    assert not (tmp_path / "late").exists()


def test_a_folder_is_planned_with_its_weights_and_its_tokenizer_from_anywhere(tmp_path, capsys, monkeypatch):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    given = [
        "plan",
        "--model",
        "./hf",
        "--cluster",
        "dgx-a100",
        "--devices",
        "8",
        "--global-batch",
        "16",
        "--seq",
        "512",
    ]
    assert main([*given, *SMALL, "--pp", "2", "--out", "out"]) == 0
    assert "weights: of hf; without checkpoint.init the run would begin from random ones" in capsys.readouterr().out
    found = read_run_file(tmp_path / "out" / "run.toml")[0]
    folder = tmp_path / "hf"
    assert (found.model.file, found.model.preset) == (folder, None)
    assert (found.checkpoint.init, found.data.tokenizer) == (folder, folder)
    (folder / "tokenizer.json").write_text(ByteTokenizer().files()["tokenizer.json"])
    for more in ([], ["--json"]):  # Megatron-LM reads no such folder, so nothing starts the layout
        assert main([*given, *SMALL, "--pp", "2", "--for", "megatron", "--export", "megatron", *more]) == 2
        printed = capsys.readouterr()
        assert "cannot express this run" in (printed.err if more else printed.out)
        assert "name its config.json as the model in place of the folder" in " ".join("".join(printed).split())
        assert not list((tmp_path / "megatron").glob("*.sh"))


def test_equivalent_layouts_are_listed_first_and_row_1_is_written(model, tmp_path, capsys):
    command = [*words(model, cluster="dgx-a100", dtype="bfloat16"), "--no-explain", "--json"]
    assert main([*command, "--out", str(tmp_path / "planned")]) == 0
    answer = json.loads(capsys.readouterr().out)
    step_s = [layout["step_time_s"] for layout in answer["layouts"]]
    ties = [layout["is_equivalent"] for layout in answer["layouts"]]
    assert ties == sorted(ties, reverse=True)
    assert ties == [seconds / min(step_s) - 1 < answer["error_bar"]["tie"] for seconds in step_s]
    assert step_s[0] < min(step_s) * (1 + SIMPLER)
    config, _ = read_run_file(tmp_path / "planned" / "run.toml")
    assert (config.layout.pp, config.layout.tp, config.layout.dp) == tuple(
        answer["layouts"][0][name] for name in ("pp", "tp", "dp")
    )


@pytest.mark.parametrize("strategies", [("none",), ("none", "slices")])
def test_strategies_may_be_limited(model, capsys, strategies):
    command = [*words(model, seq=8192, **{"global-batch": 2}), "--pp", "4", "--no-explain", "--json"]
    assert main([*command, "--strategies", *strategies]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["question"]["limits"]["strategies"] == list(strategies)
    assert (answer["counts"]["tried"] > 0) == (strategies != ("none",))
    first = answer["layouts"][0]
    assert (first["token_slices"] is not None) == (strategies != ("none",))
    assert (first["keep"], first["balance"], first["offload"]) == (None, False, False)


def test_another_row_may_be_written(model, capsys, tmp_path):
    command = [*words(model), "--no-explain", "--json", "--strategies", "none"]
    assert main([*command, "--out", str(tmp_path / "out"), "--row", "2"]) == 0
    second = json.loads(capsys.readouterr().out)["layouts"][1]
    written = tomllib.loads((tmp_path / "out" / "run.toml").read_text())["layout"]
    assert [written[name] for name in ("tp", "pp", "dp", "loops")] == [
        second[name] for name in ("tp", "pp", "dp", "loops")
    ]
    assert main([*command, "--row", "2"]) == 2
    assert "--row 2 has no effect without --out, --export or --html" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "none"), "--best", "1", "--row", "2"]) == 2
    assert "--row must be at most --best 1, found 2" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert main([*command, "--out", "/proc/none/x", "--devices", "0"]) == 2  # before any work, also for root
    assert "--out: cannot write /proc/none/x" in capsys.readouterr().err


def test_the_price_of_tokens(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command = [*words(model, cluster="dgx-a100"), "--no-explain"]
    assert main([*command, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    dollars = 4 * load_cluster("dgx-a100").price_per_device_hour * 1e9 / first["tokens_per_s"] / 3600
    assert first["dollars_per_billion_tokens"] == pytest.approx(dollars)
    assert main(command) == 0
    assert "$/1e9" in capsys.readouterr().out


def test_the_days_and_the_price_of_a_training_are_those_of_the_first_row(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command = [*words(model, cluster="dgx-a100"), "--no-explain", "--tokens", "300B"]
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    first, training = answer["layouts"][0], answer["training"]
    assert training["tokens"] == 3e11
    assert training["days"] == pytest.approx(3e11 / first["tokens_per_s"] / 86400)
    assert training["dollars"] == pytest.approx(300 * first["dollars_per_billion_tokens"])
    assert main(command) == 0
    assert f"3e+11 tokens with row 1: {training['days']:.3g} days, $" in capsys.readouterr().out
    assert main([*command[:-1], "none"]) == 2
    assert "--tokens must be an amount above 0 such as 1T, 300B or 3e11, found 'none'" in capsys.readouterr().err


SMALL = ("--no-explain", "--strategies", "none", "--tp", "1")


def test_a_goal_chooses_among_numbers_of_devices_and_the_choice_is_written(model, tmp_path, capsys):
    command = [*words(model, cluster="dgx-a100"), *SMALL, "--devices", "8", "2", "4", "--tokens", "10B"]
    assert main([*command, "--objective", "time", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    days = {one["question"]["num_devices"]: one["training"]["days"] for one in answer["answers"]}
    assert list(days) == [2, 4, 8]
    assert answer["answers"][answer["goal"]["answer"]]["question"]["num_devices"] == min(days, key=days.__getitem__)
    deadline = f"{24 * (days[4] + days[2]) / 2}h"  # 2 devices are too slow
    out = tmp_path / "planned"
    assert main([*command, "--deadline", deadline, "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the cheapest training within" in printed
    dollars = {one["question"]["num_devices"]: one["training"]["dollars"] for one in answer["answers"]}
    cheapest = min((4, 8), key=dollars.__getitem__)
    assert read_run_file(out / "run.toml")[0].layout.num_ranks == cheapest
    assert f"pipeloom on {cheapest} devices, tp 1" in printed
    assert main([*command, "--deadline", deadline]) == 0
    _, _, proposed = capsys.readouterr().out.partition("\nNext: ")
    assert proposed.count("--devices") == 1
    assert proposed.split()[-2:] == ["--devices", str(cheapest)]


def test_a_goal_that_nothing_meets_names_the_nearest_and_writes_nothing(model, tmp_path, capsys):
    command = [*words(model, cluster="dgx-a100"), *SMALL, "--tokens", "10B", "--deadline", "1h", "--max-dollars", "1"]
    out = tmp_path / "planned"
    assert main([*command, "--devices", "2", "4", "--out", str(out)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing is within 0.0417 days and for at most $1: the fastest training takes" in printed
    assert "the cheapest takes" in printed
    assert "nothing is written" in printed
    assert not out.exists()
    assert main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["goal"] == {
        "deadline_s": 3600.0,
        "max_dollars": 1.0,
        "objective": "cost",
        "is_met": False,
        "is_proved": True,
    }
    assert main(command) == 1
    assert "goal: nothing is within" in " ".join(capsys.readouterr().out.split())


def test_an_interrupted_answer_for_several_sizes_says_why_nothing_is_written(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        plan_each, "plan", lambda *args, **options: replace(plan(*args, **options), stopped="interrupt")
    )
    command = [
        *words(model, cluster="dgx-a100"),
        *SMALL,
        "--devices",
        "2",
        "4",
        "--tokens",
        "10B",
        "--deadline",
        "900d",
    ]
    out = tmp_path / "planned"
    assert main([*command, "--out", str(out)]) == 130
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing is written: the answer was interrupted" in printed
    assert "pipeloom on 4 devices: not searched, since the answer was interrupted" in printed
    assert not out.exists()


def cut_short(answer, factor):
    """A plan as if the time was up: layouts whose steps take at least so much of the fastest were not searched."""
    bound_s = factor * answer.best.prediction.step_time_s
    return replace(answer, counts=replace(answer.counts, undecided=7), open_bound_s=bound_s, stopped="time")


def test_every_size_whose_search_was_cut_short_is_marked_with_what_may_be_missing(model, capsys, monkeypatch):
    def plan_of(question, *args, **options):
        answer, number = plan(question, *args, **options), question.num_devices
        if number == 2:
            return answer
        return replace(cut_short(answer, 1.1 if number == 4 else 0.9), **({"steps": ()} if number == 8 else {}))

    monkeypatch.setattr(plan_each, "plan", plan_of)
    assert main([*words(model, cluster="dgx-a100"), *SMALL, "--devices", "1", "2", "4", "8"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split()[0] for line in printed.splitlines() if re.match(r"\d+\*? +\d", line)]
    assert rows == ["1*", "2", "4*"]
    flat = " ".join(printed.split())
    left = "the time limit was reached: 7 layouts not searched, which take at least"
    assert re.search(rf"pipeloom on 1 device: {left} \S+ m?s a step, up to 10\.0% less than this row", flat)
    assert re.search(rf"pipeloom on 4 devices: {left} \S+ m?s a step, no less than this row", flat)
    assert re.search(rf"pipeloom on 8 devices: nothing that fits was found; {left}", flat)
    assert "; with *, of the layouts that were found before the search was cut short. tp:" in flat
    assert "on 2 devices" not in flat


@pytest.mark.parametrize(("factor", "is_proved"), [(0.1, False), (0.999, True)])
def test_a_goal_names_the_searches_that_might_have_a_better_choice(model, capsys, monkeypatch, factor, is_proved):
    def plan_of(question, *args, **options):
        answer = plan(question, *args, **options)
        return cut_short(answer, factor) if question.num_devices == 2 else answer

    monkeypatch.setattr(plan_each, "plan", plan_of)
    command = [*words(model, cluster="dgx-a100"), *SMALL, "--devices", "2", "4", "--tokens", "10B"]
    command += ["--objective", "time"]
    assert main(command) == 0
    open_words = "not searched, and perhaps a better choice: layouts for pipeloom on 2 devices that take at least"
    assert (open_words in " ".join(capsys.readouterr().out.split())) != is_proved
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["goal"]["answer"], answer["goal"]["is_proved"]) == (1, is_proved)
    assert [one["is_proved"] for one in answer["answers"]] == [False, True]


def test_a_size_without_a_layout_is_named_beside_the_others(model, capsys):
    command = [*words(model, cluster="dgx-a100", **{"global-batch": 8}), *SMALL, "--pp", "1", "--devices", "3", "4"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "pipeloom on 3 devices: no layout divides 3 devices and a batch of 8 sequences" in printed
    assert "Next: a single --devices prints alternatives and reasons." in printed


def page_of(file):
    page = file.read_text()
    (text,) = re.findall(r'<script type="application/json" id="contents">(.*?)</script>', page, flags=re.S)
    assert page.count("<script") == page.count("</script>") == 2
    return json.loads(text)


def test_the_page_of_a_plan_has_what_the_terminal_prints_and_the_step_of_a_row(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    file = tmp_path / "plan.html"
    command = [*words(model, cluster="dgx-a100"), *SMALL, "--pp", "2", "--tokens", "1B", "--html", str(file)]
    assert main([*command, "--row", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    contents = page_of(file)
    assert contents["title"] == "Plan: small on 4 devices of dgx-a100, row 2"
    parts = [part for section in contents["answer"] + contents["reasons"] for part in section["parts"]]
    texts = [text for part in parts for text in [part.get("text", ""), *part.get("list", [])]]
    assert all(" ".join(text.split()) in printed for text in texts)
    layouts = next(part for part in parts if "MFU" in part.get("heads", []))
    step_time = layouts["rows"][1][next(n for n, head in enumerate(layouts["heads"]) if head.startswith("step"))]
    assert dict(contents["facts"])["step time"].startswith(step_time)
    assert contents["timeline"]["boxes"] > 0
    assert [panel["name"] for panel in contents["timeline"]["panels"]] == ["predicted"]
    assert any("Peak memory of each device" in section["head"] for section in contents["reasons"])
    assert "[layout]" in "".join(contents["config"])
    monkeypatch.setattr("pipeloom.report.answer.MOST_ACTIONS", 3)
    assert main(command) == 0
    contents = page_of(file)
    assert contents["timeline"] is None
    assert "more than a page can show" in contents["answer"][-1]["parts"][0]["text"]


@pytest.mark.parametrize("pp", [1, 2])
def test_the_bubble_is_that_of_simulate_and_none_without_a_pipeline(model, tmp_path, capsys, pp):
    file = tmp_path / "plan.html"
    command = [*words(model, cluster="dgx-a100"), *SMALL, "--pp", str(pp), "--out", str(tmp_path / "out")]
    assert main([*command, "--html", str(file)]) == 0
    assert ("bubble" in capsys.readouterr().out.split()) == (pp > 1)
    assert main(["simulate", str(tmp_path / "out" / "run.toml")]) == 0
    bubble = re.findall(r"^bubble fraction +(\S+%)", capsys.readouterr().out, flags=re.M)
    assert [value for name, value in page_of(file)["facts"] if name == "bubble"] == bubble
    assert len(bubble) == pp - 1


def test_the_page_of_a_plan_without_an_answer_says_what_would_fit(tmp_path, capsys):
    file = tmp_path / "none.html"
    sizes = ("--devices", "1", "--global-batch", "1", "--seq", "512")
    command = ["plan", "--model", "gpt-6.6b", "--cluster", "dgx-1-v100", *sizes, "--strategies", "none"]
    assert main([*command, "--html", str(file)]) == 1
    contents = page_of(file)
    assert contents["answer"][-1]["head"].startswith("nothing fits: the layout that needs least")
    assert contents["facts"] == contents["config"] == []
    assert main([*command, "--html", str(file), "--devices", "1", "2"]) == 2
    assert "--html shows the answer for one program and number of devices" in capsys.readouterr().err


def test_wrong_goals_are_one_message(model, tmp_path, capsys):
    command = [*words(model), "--devices", "2", "4", "--out", str(tmp_path / "planned")]
    assert main([*command, "--row", "2", "--deadline", "x", "--price", "0"]) == 2
    printed = capsys.readouterr().err
    for text in (
        "--deadline must be an amount above 0 such as 30d, 12h or 6w, found 'x'",
        "--deadline, --max-dollars and --objective need the tokens of the training",
        "--row 2 is a row of one table, found 2 programs and numbers of devices",
        "--price: the price of a device-hour must be above 0 and finite, found 0",
    ):
        assert text in printed
    assert main([*command, "--tokens", "1B", "--max-dollars", "3k"]) == 2
    assert "'dgx-1-v100' has no price_per_device_hour, which the goal needs" in capsys.readouterr().err
    assert main(command) == 2
    assert "found 2 of these; name one, or let a goal choose" in capsys.readouterr().err
    assert main([*words(model), *SMALL, "--tokens", "1B", "--deadline", "9w"]) == 0
    out = capsys.readouterr().out
    assert "the training of the fewest device-hours within 63 days" in out
    assert main([*words(model), *SMALL, "--tokens", "1B", "--deadline", "9w", "--price", "2", "--json"]) == 0
    training = json.loads(capsys.readouterr().out)["training"]
    assert training["dollars"] == pytest.approx(training["days"] * 24 * 4 * 2)


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_a_narrow_terminal_gets_every_column_and_figure_of_a_wide_one(model, capsys, monkeypatch, columns):
    command = [*words(model, cluster="dgx-a100"), "--families", "1f1b", "gpipe", "--strategies", "none"]
    monkeypatch.setenv("COLUMNS", "400")
    assert main(command) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(command) == 0
    narrow = capsys.readouterr().out
    assert all(len(line) <= columns for line in narrow.splitlines() if model not in line)
    assert "…" not in narrow
    figures = {word for word in wide.split() if word[0] in "$+-" or word[-1] == "%"}
    heads = {"sharded", "recompute", "tokens/s", "MFU", "bubble", "exposed", "$/1e9", "mainly"}
    assert heads <= set(wide.split())
    assert heads | figures <= set(narrow.split())


def test_the_answer_for_programs(model, capsys):
    assert main([*words(model), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["is_proved"]
    first = answer["layouts"][0]
    assert first["tp"] * first["pp"] * first["dp"] == 4
    assert sum(first["causes_s"].values()) == pytest.approx(first["step_time_s"])
    assert answer["counts"]["layouts"] == sum(answer["counts"][name] for name in ("too_large", "too_slow", "simulated"))
    assert {"kind", "layout", "more_s", "least_s"} == set(answer["rivals"][0])
    assert {change["what"] for change in answer["changes"]} >= {"10 % more memory", "half the batch"}
    assert answer["error_bar"]["rests_on"]


def test_limits_are_kept(model, capsys):
    limits = ["--pp", "2", "--families", "breadth-first", "gpipe", "--shards", "full", "--sequence-parallel", "off"]
    assert main([*words(model, devices=8, **{"global-batch": 16}), *limits, "--json", "--no-explain"]) == 0
    for layout in json.loads(capsys.readouterr().out)["layouts"]:
        assert layout["pp"] == 2
        assert layout["family"] in ("breadth-first", "gpipe")
        assert not layout["sequence_parallel"]


def test_the_written_run_can_be_planned_again(model, tmp_path, capsys):
    out = tmp_path / "planned"
    assert main([*words(model, cluster="dgx-a100", dtype="bfloat16"), "--out", str(out), "--no-explain"]) == 0
    config, problems = read_run_file(out / "run.toml")
    assert problems == []
    assert config.layout.num_ranks == 4
    assert config.layout.batch_size == 8
    main(["simulate", str(out / "run.toml"), "--schedule-out", str(tmp_path / "simulated.txt")])
    assert (tmp_path / "simulated.txt").read_text() == (out / "schedule.txt").read_text()
    assert f"start pipeloom train {out / 'run.toml'}" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(out / "run.toml"), "--no-explain", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["layouts"][0]
    assert (again["tp"], again["pp"], again["dp"]) == (config.layout.tp, config.layout.pp, config.layout.dp)


RECIPE = {
    "model.norm_eps": "1e-6",
    "data.path": "README.md",
    "data.tokenizer": "bytes",
    "optimizer.lr": "0.001",
    "optimizer.lr_warmup_steps": "3",
    "training.steps": "20",
}


def test_a_run_that_train_cannot_compute_has_its_reason_in_place_of_a_start(model, tmp_path, capsys):
    out = tmp_path / "planned"
    assert main([*words(model, dtype="float16"), "--out", str(out), "--no-explain"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "refused by pipeloom train: training.dtype float16" in output
    assert f"start pipeloom train {out / 'run.toml'}" not in output


def test_a_planned_run_trains_only_when_its_recipe_is_set(model, tmp_path, capsys, monkeypatch):
    out, folder = tmp_path / "planned", tmp_path / "trained"
    assert main([*words(model, cluster="dgx-a100", dtype="bfloat16"), "--out", str(out), "--no-explain"]) == 0
    text, output = (out / "run.toml").read_text(), capsys.readouterr().out
    config, problems = read_run_file(out / "run.toml")
    assert (problems, list(unset(config))) == ([], list(RECIPE))
    for name in RECIPE:
        assert f"# SET: {name.split('.')[1]} = ..." in text
        assert f"to set    {name}: " in output
    assert "rope_theta" not in text  # positions of this family are learned
    assert "optimizer.weight_decay 0.1" in " ".join(output.split())
    assert main(["train", str(out / "run.toml"), "--optimizer.lr", "0.001", "--output.folder", str(folder)]) == 2
    error = capsys.readouterr().err
    assert all(f"      {name} " in error for name in RECIPE if name != "optimizer.lr")
    assert "optimizer.lr " not in error
    assert not folder.exists()
    monkeypatch.chdir(Path(__file__).parents[2])
    flags = [word for name, value in RECIPE.items() for word in (f"--{name}", value)]
    known = parse_config(COMMAND, [str(out / "run.toml"), *flags])
    assert hyperparameter_problems(known) == []
    assert known.optimizer.lr == 0.001


def test_a_run_file_with_a_model_of_its_own_keeps_its_recipe(tmp_path, capsys):
    own, out = tmp_path / "own.toml", tmp_path / "planned"
    own.write_text("layout = { pp = 2, num_microbatches = 4 }\noptimizer.lr = 0.0007\ntraining.steps = 7\n")
    assert main(["plan", str(own), "--out", str(out), "--no-explain", "--families", "1f1b", "--tp", "1"]) == 0
    assert "to set" not in capsys.readouterr().out
    config, problems = read_run_file(out / "run.toml")
    assert [*problems, *hyperparameter_problems(config)] == []
    assert (config.optimizer.lr, config.training.steps) == (0.0007, 7)


def test_a_run_on_several_nodes_is_not_started_by_train(model, tmp_path, capsys):
    out = tmp_path / "planned"
    command = [
        *words(model, devices=16, cluster="dgx-a100", dtype="bfloat16", **{"global-batch": 16}),
        "--families",
        "1f1b",
        "--no-explain",
    ]
    assert main([*command, "--strategies", "none", "--out", str(out)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"start pipeloom launch {out / 'run.toml'} --out FOLDER" in output
    assert "16 processes on 2 nodes of dgx-a100" in output
    assert f"start pipeloom train {out / 'run.toml'}" not in output


@pytest.mark.parametrize(
    ("cluster", "refused", "starts"),
    [
        ("dgx-a100", "refused by pipeloom launch: 12 processes do not fill nodes of 8 devices", True),
        ("gb200-nvl72", "on 3 nodes of gb200-nvl72", False),
        ("tpu-v5e", "refused by pipeloom launch: the devices of tpu-v5e are TPUs", False),
    ],
)
def test_what_starts_a_planned_run_is_named_where_something_does(model, tmp_path, capsys, cluster, refused, starts):
    out = tmp_path / "planned"
    command = words(model, devices=12, cluster=cluster, dtype="bfloat16", **{"global-batch": 12, "pp": 1, "tp": 1})
    assert main([*command, "--strategies", "none", "--no-explain", "--out", str(out)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert refused in output
    assert (f"start pipeloom train {out / 'run.toml'} starts all 12 processes on one host" in output) == starts
    assert ("pipeloom launch " + str(out / "run.toml") in output) == (cluster == "gb200-nvl72")


def test_another_model_goes_over_that_of_a_run_file(model, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*words(model), "--out", str(first), "--no-explain"]) == 0
    other = tmp_path / "other.toml"
    other.write_text(MODEL.replace("layers = 6", "layers = 9"))
    assert main(["plan", str(first / "run.toml"), "--model", str(other), "--out", str(second), "--no-explain"]) == 0
    assert read_run_file(second / "run.toml")[0].model.file == other
    capsys.readouterr()
    assert main(["simulate", str(second / "run.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["shape"]["layers"] == 9


def test_what_others_launch_is_written(model, tmp_path, capsys):
    folder = tmp_path / "start"
    assert main([*words(model, dtype="float32"), "--export", str(folder), "--no-explain"]) == 0
    assert (folder / "torchrun.sh").exists()
    assert "torchrun" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "programs"),
    [
        ({"devices": 8, "pp": 2}, ["torchrun", "Slurm", "Megatron-LM with Megatron Core 0.16"]),
        ({"devices": 8, "pp": 2, "shards": "full"}, ["torchrun", "Slurm"]),
        ({"devices": 12, "pp": 1}, []),  # nodes that are not full
        ({"devices": 8, "pp": 2, "cluster": "tpu-v5e"}, []),
    ],
)
def test_programs_are_named_for_an_export_if_they_can_start_the_first_row(model, tmp_path, capsys, changes, programs):
    given = {"cluster": "dgx-a100", "global-batch": 24, "dtype": "bfloat16", "tp": 1, "families": "1f1b", "loops": 1}
    command = [*words(model, **given | {"shards": "optimizer"} | changes), "--strategies", "none", "--no-explain"]
    assert main(command) == 0
    _, _, proposed = " ".join(capsys.readouterr().out.split()).partition("Next: ")
    found = re.search(r"--export start in place of --out planned writes start files for (.*?)\. pipeloom", proposed)
    assert (re.split(", | and ", found[1]) if found else []) == programs
    assert main([*command, "--export", str(tmp_path / "start")]) == (0 if programs or changes.get("cluster") else 2)
    answers = re.findall(r"^(\w+): (.+?)( cannot express this run)?$", capsys.readouterr().out, re.MULTILINE)
    assert [
        program for name, program, why in answers if name in TARGETS and TARGETS[name].starts and not why
    ] == programs


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"cluster": "dgx-1-v10"}, ["did you mean 'dgx-1-v100'"]),
        ({"devices": 0, "seq": 0}, ["devices must be at least 1", "seq must be at least 1"]),
        (
            {"dtype": "bfloat16"},
            ["the dtype must be one that v100-sxm-32gb computes in: float32, float16, found bfloat16"],
        ),
        ({"families": "zebra"}, ["pipeloom has no family 'zebra'; it has"]),
        ({"families": "gpip"}, ["pipeloom has no family 'gpip'; did you mean 'gpipe'? it has"]),
        ({"cluster": "dgx-h200"}, ["did you mean 'h200', 'dgx-b200' or 'dgx-h100'?"]),
        ({"devices": 11, "global-batch": 7}, ["no layout divides 11 devices", "instead of 7", "instead of 11"]),
        ({"tp": 3}, ["tp must divide the number of devices, 4, found 3", "limits are set on tp"]),
        ({"best": 0, "budget-s": "nan"}, ["--best must be at least 1", "--budget-s must be above 0, found nan"]),
        ({"global-batch": 10**20}, ["the global batch must be at most 1,000,000,000"]),
    ],
)
def test_wrong_questions_are_helped(model, changes, parts, capsys):
    assert main(words(model, **changes)) == 2
    err = capsys.readouterr().err
    assert all(part in err for part in parts), err
    assert "Traceback" not in err


def test_everything_that_is_missing_is_reported_at_once(capsys):
    assert main(["plan", "--model", "lama-3-8b", "--devices", "8"]) == 2
    err = capsys.readouterr().err
    assert "--cluster, --global-batch, --seq as well" in err
    assert "did you mean 'llama-3-8b'" in err
    assert main(["plan", "--model", "llama-3-8b", "--devices", "x", "--families", "gpip", "--strategies", "of"]) == 2
    err = capsys.readouterr().err
    assert all(part in err for part in ("--devices must be", "no family 'gpip'", "no strategy 'of'", "--cluster, --gl"))


def test_a_model_that_fits_nowhere_gets_the_missing_memory(model, capsys):
    Path(model).write_text(MODEL.replace("hidden = 1024", "hidden = 16384").replace("ffn = 4096", "ffn = 65536"))
    assert main(words(model)) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing fits" in out
    assert "GB are missing on the fullest device" in out
    assert "devices it fits" in out


@pytest.mark.usefixtures("loses_exceptions")
def test_ctrl_c_prints_the_answer_so_far(capsys, monkeypatch):
    """Of 58,190 layouts, the first that fits is found long before the others are excluded."""

    monkeypatch.setattr(PlanProgress, "found", lambda *_: signal.raise_signal(signal.SIGINT))
    question = ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--global-batch", "1000000", "--seq", "2048"]
    assert main(["plan", *question, "--devices", "1000000"]) == 130
    out = " ".join(capsys.readouterr().out.split())
    assert "interrupted: " in out
    assert "which take at least" in out or "nothing that fits was found before the interrupt" in out


def test_without_a_terminal_progress_is_lines(capsys):
    with PlanProgress(is_shown=True, first_s=0.5) as progress:
        progress.show(3, 1000)
        shown, end = "", time.monotonic() + 20
        while not shown and time.monotonic() < end:
            time.sleep(0.02)
            shown = capsys.readouterr().err
    assert re.fullmatch(r"planning: 3 of 1,000 layouts decided, \d+ s\n", shown)
    with PlanProgress(is_shown=False, first_s=0.01):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_layouts_are_shown_as_they_are_found(model, capsys):
    steps = []
    question = make_question("gpt-6.6b", "dgx-a100", num_devices=16, global_batch=32, seq=1024, strategies=("none",))
    answer = plan(question, 3, explains=False, found=steps.append)
    seconds = [step.prediction.step_time_s for step in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(answer.best.prediction.step_time_s)
    with PlanProgress(is_shown=True, first_s=0.0) as progress:
        progress.found(steps[0])
    line = rf"^found so far, after \d+\.\d s: [\d,]+ ms: {re.escape(settings_words(steps[0]))}$"
    assert re.search(line, capsys.readouterr().err, re.MULTILINE)
    with PlanProgress(is_shown=True, first_s=60.0) as progress:
        progress.found(steps[0])
    assert capsys.readouterr().err == ""  # most answers come before that


def test_a_context_axis_with_which_long_sequences_fit_is_named(capsys):
    """It is not searched by default."""
    given = ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--devices", "16", "--global-batch", "16"]
    assert main(["plan", *given, "--seq", "400000", "--no-explain"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    found = re.search(r"with a context axis \(--cp\) it fits: [^(]*\([^)]*cp (\d+),", out)
    assert found is not None
    assert main(["plan", *given, "--seq", "400000", "--no-explain", "--cp", found[1]]) == 0


def test_sequences_that_fit_nowhere_are_named_with_a_length_that_would(model, capsys):
    command = words(model, seq=100_000_000, devices=1, **{"global-batch": 1, "software": "megatron-2021"})
    assert main([*command, "--no-explain"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "grow with the length of the sequences (micro-batches of 1 sequence of 100,000,000 tokens)" in out
    assert re.search(r"- with sequences of [\d,]+ tokens it fits", out)
    assert "choose a smaller model" not in out


def test_a_changed_cluster_is_planned_and_written(tmp_path, capsys):
    words = ["plan", "--model", "gpt-6.6b", "--cluster", "dgx-a100", "--devices", "16", "--global-batch", "64"]
    words += ["--seq", "1024", "--no-explain", "--json", "--pp", "2", "--tp", "8", "--families", "1f1b"]
    change = ["--machine.inter-bandwidth", "0.1x"]
    assert main([*words, *change, "--out", str(tmp_path / "slow")]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["question"]["cluster"] == "dgx-a100, inter bandwidth x 0.1"
    assert main(["simulate", str(tmp_path / "slow" / "run.toml"), "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    assert step["step_time_s"] == pytest.approx(slow["layouts"][0]["step_time_s"])
    assert step["own_step_time_s"] < step["step_time_s"]
    assert main([*words, "--machine.inter-bandwidth", "fast"]) == 2
    assert "machine.inter_bandwidth must be a factor" in capsys.readouterr().err


def test_what_the_search_does_not_price_is_refused_with_all_names(tmp_path, capsys):
    run = tmp_path / "run.toml"
    run.write_text("model.experts = 4\nmodel.share_layers = 2\nlayout.average_every = 2\ntraining.freeze_layers = 0\n")
    assert main(["plan", str(run), "--cluster", "dgx-h100", "--devices", "8"]) == 2
    found = re.findall(r"- ([a-z._ ]+): the search prices", " ".join(capsys.readouterr().err.split()))
    assert sorted(found) == ["layout.average_every", "model.share_layers", "training.freeze_layers"]
    run.write_text("layout.dp = 2\nlayout.microbatches = [3, 1]\n")
    assert main(["plan", str(run), "--cluster", "dgx-h100", "--devices", "8"]) == 2
    assert "- layout.microbatches: the search prices equal numbers" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("model.experts = 4\nmodel.density = 0.5\n", "model.density does not work with model.experts 4"),
        ("model.density = 0.5\nadapter.rank = 2\n", "model.density does not work with adapter.rank 2"),
        (
            'model.experts = 4\nmodel.balance = "bias"\nadapter.rank = 2\n',
            "model.balance bias moves routers, which adapter.rank freezes",
        ),
        (
            'adapter.rank = 2\noptimizer.name = "lomo"\noptimizer.wide_weights = false\ntraining.dtype = "bfloat16"\n',
            "optimizer.wide_weights false does not work with adapter.rank",
        ),
    ],
)
@pytest.mark.parametrize("command", ["plan", "simulate", "train"])
def test_what_no_layout_trains_is_refused_by_every_command_alike(tmp_path, capsys, command, lines, problem):
    run = tmp_path / "run.toml"
    run.write_text(lines)
    assert main([command, str(run)]) == 2
    assert " ".join(capsys.readouterr().err.split()).count(problem) == 1


def test_an_optimizer_of_whole_matrices_is_planned_without_a_tensor_axis_whatever_the_file_has(tmp_path, capsys):
    run = tmp_path / "run.toml"
    run.write_text('optimizer.name = "muon"\nlayout.tp = 2\n')
    assert main(["plan", str(run), "--cluster", "dgx-h100", "--devices", "8", "--no-explain", "--json"]) == 0
    assert {layout["tp"] for layout in json.loads(capsys.readouterr().out)["layouts"]} == {1}
    assert main(["plan", str(run), "--cluster", "dgx-h100", "--devices", "8", "--tp", "2"]) == 2
    assert "the optimizer updates whole matrices, which tp divides" in capsys.readouterr().err


def test_a_plan_with_attention_within_documents_simulates_the_same_and_computes_no_halves(tmp_path, capsys):
    run, words = tmp_path / "run.toml", ["--cluster", "laptop", "--devices", "4", "--no-explain", "--json"]
    run.write_text(
        'data.attention = "document"\ndata.seq_len = 512\nmodel.experts = 4\nmodel.balance = "bias"\n'
        "layout.num_microbatches = 4\n"
    )
    limits = ["--pp", "2", "--loops", "2", "--families", "1f1b", "breadth-first", "--strategies", "none"]
    assert main(["plan", str(run), *words, *limits, "--out", str(tmp_path / "new")]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert not any(layout["ep_overlap"] for layout in layouts)
    assert main(["simulate", str(tmp_path / "new" / "run.toml"), "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    assert step["step_time_s"] == pytest.approx(layouts[0]["step_time_s"])
    assert max(memory["total_bytes"] for memory in step["memory"]) == pytest.approx(layouts[0]["memory_bytes"])
