"""The table of measurements: read, and refused with a clear message."""

from pathlib import Path

import pytest

from pipeloom.accuracy.rows import Group, read_rows
from pipeloom.errors import ConfigError, UserError

EXAMPLE = Path(__file__).parents[2] / "examples" / "measured.csv"


def changed(tmp_path, **cells):
    """The example with cells of its first row changed."""
    header, first, *rest = EXAMPLE.read_text(encoding="utf-8").splitlines()
    names, values = header.split(","), first.split(",")
    for name, value in cells.items():
        values[names.index(name)] = value
    file = tmp_path / "table.csv"
    file.write_text("\n".join([header, ",".join(values), *rest]) + "\n", encoding="utf-8")
    return file


def test_the_example_is_read():
    rows = read_rows(EXAMPLE)
    assert [row.run.shape.name for row in rows] == ["gpt-1.7b", "gpt-3.6b", "gpt-7.5b", "gpt-18b", "gpt-22b", "gpt-22b"]
    assert rows[0].step_time_s == 3.53
    assert rows[0].memory_bytes is None
    assert rows[3].run.tp == 8
    assert rows[3].run.num_microbatches == 4
    assert rows[0].group == Group(
        *("megatron-2104.04473-table1", "gpt-1.7b", 2048, 32, 512, "fused-softmax"), fused_norm=True, precision="fp16"
    )


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"dp": "31"}, "line 2: tp x cp x dp x pp is 31, found devices 32"),
        ({"layers": "many"}, "line 2: layers must be a whole number of at least 1, found 'many'"),
        ({"micro_batch": "0"}, "line 2: micro_batch must be a whole number of at least 1, found '0'"),
        ({"step_time_s": "-3"}, "line 2: step_time_s must be a number above 0 or blank, found '-3'"),
        ({"step_time_s": "nan"}, "line 2: step_time_s must be a number above 0 or blank, found 'nan'"),
        ({"tied": "yes"}, "line 2: tied must be 0 or 1, found 'yes'"),
        ({"attention": "flash9"}, "line 2: attention must be one of plain, fused-softmax, flash1, flash2"),
        ({"status": "good"}, "line 2: status must be one of ok, oom, found 'good'"),
        ({"heads": "25"}, "line 2: hidden 2304 must be divisible by heads 25"),
        ({"status": "", "step_time_s": ""}, "line 2: status must be one of ok, oom, found ''"),
        ({"hidden": "", "ffn": ""}, "line 2: hidden must be a whole number of at least 1, found ''"),
    ],
)
def test_a_wrong_cell_is_named_with_its_line(tmp_path, cells, message):
    with pytest.raises(ConfigError) as caught:
        read_rows(changed(tmp_path, **cells))
    assert message in str(caught.value)


def test_rows_without_a_model_are_counted_by_reason_where_the_caller_reports_them(tmp_path):
    skipped: dict[str, int] = {}
    rows = read_rows(changed(tmp_path, precision="mxfp8"), skipped)
    assert len(rows) == len(read_rows(EXAMPLE)) - 1
    assert skipped == {"precision must be one of fp32, bf16, fp16, fp8, found 'mxfp8'": 1}
    with pytest.raises(ConfigError, match="found 'many'"):
        read_rows(changed(tmp_path, precision="mxfp8", layers="many"), skipped)


def test_words_are_read_in_any_case(tmp_path):
    (row, *_) = read_rows(changed(tmp_path, status="OK", precision="BF16", attention="Flash2", device="A100 SXM 80GB"))
    assert (row.is_ok, row.run.precision, row.run.attention, row.device) == (True, "bf16", "flash2", "a100-sxm-80gb")


def test_context_parallelism_is_a_column_or_an_item_of_the_note(tmp_path):
    (first, *_) = read_rows(changed(tmp_path, dp="16", note="cp=2; bf16 gradients"))
    assert (first.run.cp, first.run.num_devices) == (2, 32)
    header, row = changed(tmp_path, dp="16").read_text(encoding="utf-8").splitlines()[:2]
    file = tmp_path / "column.csv"
    file.write_text(f"cp,{header}\n2,{row}\n", encoding="utf-8")
    assert read_rows(file)[0].run.cp == 2
    with pytest.raises(ConfigError, match="cp must be a whole number of at least 1, found 'two'"):
        read_rows(changed(tmp_path, note="cp=two"))


def test_hybrid_sharding_is_a_column_or_words_of_the_note(tmp_path):
    cells = {"shard": "full", "note": "sharded within a node only"}
    assert read_rows(changed(tmp_path, **cells))[0].run.shard_size == 8
    assert read_rows(changed(tmp_path, **cells | {"note": "replicate=2"}))[0].run.shard_size == 16
    with pytest.raises(ConfigError, match="replicate 3 must divide dp 32"):
        read_rows(changed(tmp_path, **cells | {"note": "replicate=3"}))


def test_an_optimizer_that_is_sharded_over_some_ranks_is_in_the_words_of_the_note(tmp_path):
    cells = {"shard": "optimizer", "note": "optimizer sharded over 4 ranks only"}
    assert read_rows(changed(tmp_path, **cells))[0].run.replicate == 8
    assert read_rows(changed(tmp_path, **cells | {"note": "replicate=2; sharded over 4 ranks"}))[0].run.replicate == 2
    with pytest.raises(ConfigError, match="dp must be a whole number"):
        read_rows(changed(tmp_path, **cells | {"dp": "many"}))


@pytest.mark.parametrize(
    ("note", "network"),
    [
        ("nodes 4 x 100 Gb/s Omni-Path; fp16", (4, 50e9, False)),
        ("1600 Gb/s RoCE per node", (0, 200e9, False)),
        ("no compile; 400 Gb/s per GPU; TPS", (0, 50e9, True)),
        ("EFA 3200 Gb/s; 8 GPUs per node", (0, 400e9, False)),
    ],
)
def test_a_note_may_state_the_network(tmp_path, note, network):
    assert read_rows(changed(tmp_path, note=note))[0].network == network
    assert read_rows(EXAMPLE)[0].network is None


def test_fp8_is_the_precision_of_products(tmp_path):
    row = read_rows(changed(tmp_path, precision="fp8"))[0]
    assert (row.run.precision, row.run.products, row.group.precision) == ("bf16", "fp8", "fp8")


def test_wrong_cells_are_listed_and_the_rest_counted(tmp_path):
    file = tmp_path / "table.csv"
    header, first, *_ = EXAMPLE.read_text(encoding="utf-8").splitlines()
    wrong = first.replace(",ok,", ",good,")
    file.write_text("\n".join([header, *[wrong] * 25]), encoding="utf-8")
    with pytest.raises(ConfigError, match="and 5 more"):
        read_rows(file)


def test_a_missing_column_an_empty_table_and_no_table(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("set,status\n", encoding="utf-8")
    with pytest.raises(UserError, match="lacks the columns step_time_s, memory_bytes, model"):
        read_rows(file)
    file.write_text(EXAMPLE.read_text(encoding="utf-8").splitlines()[0], encoding="utf-8")
    with pytest.raises(UserError, match="has a header and no rows"):
        read_rows(file)
    with pytest.raises(UserError, match="cannot read the table"):
        read_rows(tmp_path / "nowhere.csv")


def test_blank_cells_get_what_the_rest_of_the_row_says(tmp_path):
    blank = dict.fromkeys(("kv_heads", "ffn", "devices", "loops", "schedule", "shard", "status", "note", "tied"), "")
    row = read_rows(changed(tmp_path, **blank))[0]
    assert (row.run.shape.kv_heads, row.run.shape.ffn, row.run.num_devices, row.run.loops) == (24, 4 * 2304, 32, 1)
    assert (row.schedule, row.run.shard, row.is_ok, row.run.shape.tied) == ("none", "none", True, False)
    assert read_rows(changed(tmp_path, pp="2", devices="64", schedule=""))[0].schedule == "1f1b"


def test_a_row_may_tell_only_that_it_ran(tmp_path):
    row = read_rows(changed(tmp_path, step_time_s=""))[0]
    assert row.is_ok
    assert row.step_time_s is None
    assert row.memory_bytes is None


def test_a_set_whose_tables_have_another_vocabulary_than_its_runs_gets_that_of_its_runs(tmp_path):
    first = read_rows(changed(tmp_path, set="zero-bubble-2401.10241", vocab="50257"))[0]
    assert first.run.shape.vocab == 32_000
    assert read_rows(changed(tmp_path, vocab="50257"))[0].run.shape.vocab == 50_257
