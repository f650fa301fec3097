"""Options that are on the command line and have no effect are refused, also those with their default value."""

from pathlib import Path

import pytest

from pipeloom.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLE = str(EXAMPLES / "measured.csv")
RUN = str(EXAMPLES / "run.toml")
LAUNCH = ("launch", RUN, "--out", "start", "--to")
PLAN = ("plan", "--model", "gpt-6.6b", "--cluster", "dgx-a100", "--global-batch", "64", "--seq", "1024", "--no-explain",
        "--best", "1", "--devices")  # fmt: skip
NO_SPLIT = "--split-backward has no effect: the schedule has no whole backward to split; leave it out"
REFUSED = {
    ("validate", TABLE, "--fit", "f.toml", "--plot", "p.svg", "--groups"): [
        "--groups, --plot have no effect with --fit; leave them out"
    ],
    ("validate", "--stage-times", TABLE, "--sets", "a", "--models", "b", "--attentions", "flash2", "--cluster", "c",
     "--software", "d", "--fit", "f.toml", "--plot", "p.svg", "--groups", "--parameters", "matmul"): [
        ("--sets, --models, --attentions, --cluster, --software, --fit, --parameters, --groups, --plot have no effect "
         "with --stage-times; leave them out")
    ],
    ("validate", TABLE, "--parameters", "matmul", "--groups", "--json"): [
        "--parameters has no effect without --fit; give both or leave it out",
        "--groups has no effect with --json; leave it out",
    ],
    (*LAUNCH, "torchrun", "--image", "a", "--name", "pipeloom", "--volume", "x:/y", "--time-limit", "24:00:00"): [
        "--name, --time-limit, --image, --volume have no effect on torchrun; leave them out"
    ],
    (*LAUNCH, "slurm", "torchrun", "--image", "a", "--name", "b"): [
        "--image has no effect on slurm, torchrun; leave it out"
    ],
    (*LAUNCH, "kubeflow", "--image", "a", "--time-limit", "1:00:00", "--layout.pp", "0"): [
        "--time-limit has no effect on kubeflow; leave it out",
        "layout.pp must be at least 1, found 0",
    ],
    (*LAUNCH[:-1], "--volume", "x:/y"): ["--volume has no effect without --image; give both or leave it out"],
    ("profile", "--processes", "1", "--seq", "128", "--micro-batches", "1", "--tp", "1", "--recompute", "none",
     "--sequence-parallel"): [
        ("--seq, --micro-batches, --tp, --recompute, --sequence-parallel have no effect without --model; give that or "
         "leave them out")
    ],
    ("profile", "--processes", "0", "--model", "nowhere", "--no-sequence-parallel"): [
        "--no-sequence-parallel has no effect without --tp of at least 2; give both or leave it out",
        "--processes must be at least 1, found 0",
    ],
    ("survive", RUN, "--trace", "f.csv", "--checkpoint-time", "20s", "--repair-time", "1d", "--move-time", "1s"): [
        "--repair-time has no effect with --trace; leave it out",
        "--move-time has no effect without --rebalance-every; give both or leave it out",
    ],
    ("slices", RUN, "--layout.token-slices", "4"): [
        ("--layout.token-slices has no effect on slices; leave it out (a run file may have the setting for other "
         "commands)")
    ],
    ("schedule", "1f1b", "--receive-buffers", "2", "--json", "--format", "text"): [
        "--receive-buffers has no effect without --communication",
        "--json and --format text disagree; choose one",
    ],
    ("schedule", "forward-only", "--backward", "2", "--reduce-grad", "--update", "at-once", "--balance"): [
        "--backward has no effect: the schedule has no backward; leave it out",
        "--reduce-grad has no effect: the schedule has no backward; leave it out",
        "--update has no effect: the schedule has no backward; leave it out",
        "--balance has no effect: the schedule has no backward; leave it out",
    ],
    ("schedule", "forward-only", "--split-backward", "0"): [NO_SPLIT],
    ("schedule", "zb-h1", "--split-backward", "end"): [NO_SPLIT],
    ("schedule", "gpipe", "--pp", "1", "--transfer", "0", "--communication", "--placement", "v", "--balance"): [
        "--communication has no effect: there is one pipeline rank; leave it out",
        "--transfer has no effect: there is one pipeline rank; leave it out",
        "--placement has no effect: there is one pipeline rank; leave it out",
        "--balance has no effect: there is one pipeline rank; leave it out",
    ],
    ("schedule", "1f1b", "--gather", "0"): [
        "--gather has no effect: the schedule has no UNSHARD; add --unshard or leave it out"
    ],
    ("schedule", "1f1b", "--format", "torch-csv", "--forward", "1", "--backward", "9"): [
        "--forward, --backward have no effect with --format torch-csv; leave them out"
    ],
    ("schedule", "--run", RUN, "--format", "text", "--forward", "2", "--num-microbatches", "8"): [
        "--forward has no effect with --format text of a run; leave it out",
        f"{RUN}: the run contains the whole schedule, so --num-microbatches has no effect; leave it out",
    ],
    ("schedule", "s.txt", "--num-microbatches", "8", "--pp", "4"): [
        "s.txt contains the whole schedule, so --pp, --num-microbatches have no effect; leave them out"
    ],
    (*PLAN, "8", "--pp", "1", "--tp", "1", "--boundary", "int8", "--search-orders", "3", "--strategies", "balance",
     "none", "order", "--sequence-parallel", "off"): [
        "--boundary has no effect in layouts of one pipeline rank; leave it out",
        "--sequence-parallel has no effect in layouts of one tensor-parallel rank; leave it out",
        "--strategies balance has no effect: every layout has one pipeline rank; leave it out",
        "--search-orders has no effect: every layout has one pipeline rank; leave it out",
    ],
    (*PLAN, "2", "--dp", "1", "--shards", "full"): [
        "--shards has no effect in layouts of one data-parallel rank; leave it out"
    ],
    (*PLAN, "1", "--shards", "full", "--boundary", "int8", "--strategies", "slices"): [
        "--shards has no effect in layouts of one data-parallel rank; leave it out",
        "--boundary has no effect in layouts of one pipeline rank; leave it out",
        "--strategies slices has no effect: every layout has one pipeline rank; leave it out",
    ],
    (*PLAN, "2", "4", "--strategies", "swap", "none"): [
        "--strategies swap has no effect: stages are swapped through one device alone; leave it out"
    ],
    (*PLAN, "2", "2"): ["--devices has 2 more than once; give each value once"],
    (*LAUNCH, "slurm", "slurm"): ["--to has slurm more than once; give each value once"],
}  # fmt: skip
"""Words of a command -> what is refused, in one message."""


@pytest.mark.parametrize(("words", "sentences"), REFUSED.items(), ids=[" ".join(words)[:80] for words in REFUSED])
def test_an_option_without_an_effect_is_refused(capsys, tmp_path, monkeypatch, words, sentences):
    monkeypatch.chdir(tmp_path)
    assert main(list(words)) == 2
    error = capsys.readouterr().err
    assert [sentence for sentence in sentences if f"  - {sentence}\n" not in error] == [], error
    assert error.count("no effect") == sum("no effect" in sentence for sentence in sentences), error
    assert not list(tmp_path.iterdir())


USED = [
    ("schedule", "1f1b", "--transfer", "0.5", "--receive-buffers", "2", "--balance", "--split-backward", "0"),
    ("schedule", "1f1b", "--format", "torch-csv", "--forward", "3", "--plot", "step.svg"),
    ("schedule", "breadth-first", "--backward", "3", "--plot", "step.svg", "--beside", "forward-only"),
    ("schedule", "zb-h1", "--weight", "0.5", "--plot", "step.svg", "--beside", "1f1b"),
    (*PLAN, "1", "8", "--strategies", "swap", "none", "--shards", "full", "--boundary", "int8"),
    ("validate", TABLE, "--groups"),
    (*LAUNCH, "slurm", "torchrun", "--name", "b", "--time-limit", "1:00:00"),
    (*LAUNCH[:-1], "--image", "a", "--volume", "x:/y"),
]


@pytest.mark.parametrize("words", USED, ids=" ".join)
def test_the_same_options_are_taken_where_they_have_one(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert main(list(words)) == 0, capsys.readouterr().err


def test_what_follows_from_a_wrong_value_is_not_reported(capsys):
    assert main(["validate", TABLE, "--parameters", "matmul", "--fit"]) == 2
    error = capsys.readouterr().err
    assert "--fit must be a path, found nothing" in error
    assert "no effect" not in error
