"""The least memory of a run, and what is refused for it."""

import math
from dataclasses import replace

import pytest
import torch

from pipeloom.cli import main
from pipeloom.config import DataConfig, ModelConfig, RunConfig
from pipeloom.errors import HostError
from pipeloom.predict.need import need_by_pipeline_rank, reference_bytes
from pipeloom.system.host_memory import Available
from pipeloom.training import memory_check
from pipeloom.training.memory_check import check_memory, processes_here
from pipeloom.training.stages import piece_bytes, stage_of
from pipeloom.workload.layout import Layout

SMALL = RunConfig(
    model=ModelConfig(num_layers=4, hidden_size=32, num_heads=2, vocab_size=300),
    layout=Layout(pp=2, loops=2, num_microbatches=4),
    data=DataConfig(seq_len=16),
)
STATE = ("weights", "gradients", "the optimizer's state")


def changed(config, **sections):
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def least(config, **how):
    """Of all pipeline ranks together, by part."""
    needs = need_by_pipeline_rank(config, **how)
    return {name: sum(need.device.get(name, 0.0) for need in needs) for name in needs[0].device}


def there(monkeypatch, size_bytes, addresses=math.inf):
    monkeypatch.setattr(memory_check, "available_memory", lambda: Available(size_bytes, "free on this host"))
    monkeypatch.setattr(memory_check, "address_space", lambda: Available(addresses, "left of the limit of addresses"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_state_is_that_of_the_parameters_and_never_more(family, dtype):
    config = changed(SMALL, model={"family": family}, training={"dtype": dtype})
    config = replace(config, model=config.model.resolve(300))
    whole = sum(piece_bytes(config))
    found = sum(least(config)[name] for name in STATE)
    assert 0.9 * whole < found <= whole


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_activations_are_fewer_than_what_a_forward_saves(family, recompute):
    layout = {"pp": 1, "loops": 1, "num_microbatches": 1, "recompute": recompute}
    config = changed(SMALL, model={"family": family}, layout=layout)
    config = replace(config, model=config.model.resolve(300))
    model = stage_of(config, range(6), torch.device("cpu"))
    model.set_recompute(config.layout.recompute_by_layer(4))
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(torch.zeros(config.layout.microbatch_size, 16, dtype=torch.long))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = sum(size for place, (size, _) in storages.items() if place not in weights)
    found = least(config)
    assert 0.1 * saved < found["activations"] <= saved
    assert found["logits"] <= output.untyped_storage().nbytes()


@pytest.mark.parametrize("family", ["breadth-first", "depth-first", "hybrid"])
def test_a_rank_holds_the_inputs_that_its_row_says(family):
    config = changed(SMALL, schedule={"family": family})
    peaks = config.choice().make().peak_stage_inputs
    each = 2 * 16 * 4 * (3 * 32 + 96)  # bytes of a layer's inputs to matrix products; each stage has one or two layers
    for need, inputs in zip(need_by_pipeline_rank(config), peaks, strict=True):
        assert need.device["activations"] <= inputs * 2 * each
    assert need_by_pipeline_rank(config)[0].device["activations"] >= each


def test_sharding_shares_out_the_state():
    alone = least(changed(SMALL, layout={"dp": 4}))
    # The optimizer updates a share of the weights in memory of its own.
    for shard, shares in [("optimizer", (5, 4, 1)), ("gradients", (5, 1, 1)), ("full", (1, 1, 1))]:
        found = least(changed(SMALL, layout={"dp": 4, "shard": shard}))
        assert [found[name] for name in STATE] == [alone[name] * n / 4 for name, n in zip(STATE, shares, strict=True)]


def test_a_proof_has_no_optimizer_and_a_whole_model_more():
    found = least(SMALL, verifies=True)
    assert found["the optimizer's state"] == 0
    assert sum(reference_bytes(SMALL).values()) == pytest.approx(found["weights"] + found["gradients"], rel=0.1)


def test_a_run_is_refused_by_one_byte_and_not_at_the_bound(monkeypatch):
    needs = need_by_pipeline_rank(SMALL)
    needed = sum(sum(need.device.values()) + sum(need.host.values()) for need in needs)
    there(monkeypatch, needed)
    check_memory(SMALL)
    there(monkeypatch, needed - 1)
    with pytest.raises(HostError, match="2 processes of this run take at least .* are free on this host"):
        check_memory(SMALL)


def test_one_process_takes_what_several_take(monkeypatch):
    there(monkeypatch, 1e6)
    with pytest.raises(HostError, match="1 process of this run takes at least"):
        check_memory(changed(SMALL, layout={"pp": 1}))


@pytest.mark.parametrize(
    ("sections", "part", "advice"),
    [
        ({"model": {"hidden_size": 60000}}, "the optimizer's state", "use a smaller model"),
        ({"data": {"seq_len": 10**8}}, "activations", "data.seq_len"),
        ({"layout": {"microbatch_size": 10**7, "recompute": "full"}}, "activations", "layout.microbatch_size"),
        ({"layout": {"dp": 10**5}}, "tokens of the batch", "layout.num_microbatches"),
        ({"model": {"vocab_size": 10**7}, "layout": {"microbatch_size": 1000}}, "logits", "model.vocab_size"),
    ],
)
def test_the_largest_part_is_named_with_what_to_change(monkeypatch, sections, part, advice):
    there(monkeypatch, 1e9)
    with pytest.raises(HostError, match=f"the largest part is {part}, .*{advice}"):
        check_memory(changed(SMALL, **sections))


def test_a_process_that_may_not_map_what_it_needs_is_refused(monkeypatch):
    there(monkeypatch, math.inf, addresses=1e6)
    with pytest.raises(HostError, match="a process of this run takes at least"):
        check_memory(SMALL)


def test_stages_in_files_need_no_more_than_their_budget(monkeypatch):
    config = changed(SMALL, model={"hidden_size": 4096}, layout={"pp": 1, "loops": 6})
    there(monkeypatch, 2e9)
    with pytest.raises(HostError, match="the optimizer's state"):
        check_memory(changed(config, schedule={"device_budget": "1GB"}))
    check_memory(changed(config, schedule={"device_budget": "1GB", "swap_folder": "swaps"}))


def test_under_a_launcher_each_host_counts_its_own_ranks_once(monkeypatch):
    config = changed(SMALL, layout={"dp": 2})
    for name, value in {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert processes_here(config) == {1: 2}
    there(monkeypatch, 1.0)
    with pytest.raises(HostError, match="2 processes"):
        check_memory(config)
    monkeypatch.setenv("LOCAL_RANK", "1")
    check_memory(config)  # the first process of this host has printed it


def test_every_host_says_what_it_lacks_even_if_it_is_not_the_first(monkeypatch, capsys):
    for name, value in {"RANK": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    there(monkeypatch, 1.0)
    assert main(["train", "--layout.dp", "2"]) == 2
    assert "not enough memory: 4 processes" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "verify"])
def test_what_this_host_cannot_hold_is_refused_before_text_is_read(monkeypatch, capsys, tmp_path, command):
    there(monkeypatch, 8e9)
    monkeypatch.setattr("pipeloom.data.text.load_data", None)
    monkeypatch.chdir(tmp_path)  # where `outputs` would be made
    model = ["--model.num-layers", "80", "--model.hidden-size", "8192", "--model.num-heads", "64"]
    assert main([command, *model]) == 2
    captured = capsys.readouterr()
    assert "EQUAL" not in captured.out
    (line,) = captured.err.splitlines()
    assert "4 processes of this run take at least" in line
    assert not list(tmp_path.iterdir())
