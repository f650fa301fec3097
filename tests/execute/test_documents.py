"""Attention that ends at documents: a window of three documents trains as three runs alone, in every family."""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
import torch
from families import SOME, TRAINING, fitting
from gloo import differences_over_gloo
from in_process import InProcessLanes, MovePost, Neighborhood, Post, play_in_process
from small_run import small_run
from stage_outputs import stage_outputs
from thinned import thinned
from toy import make_executor
from transformer_ranks import NUM_TOKENS, ROWS, VOCAB, TransformerCluster, schedule_of

from pipeloom.config import ModelConfig, ScheduleConfig
from pipeloom.data.text import load_data
from pipeloom.data.windows import mark_begins
from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.parts.moves import ActivationMoves
from pipeloom.execute.stages.batch import Batch
from pipeloom.execute.stages.stage import StepDocuments
from pipeloom.families import make_schedule
from pipeloom.model import SplitVocabulary, build_stage, stage_pieces
from pipeloom.model.cross_entropy import summed_cross_entropy
from pipeloom.passes import balance, lower, offload, recompute_beyond
from pipeloom.schedule.kinds import MOVE_KINDS
from pipeloom.workload.layout import Layout

LENGTHS = ((5, 9, 11), (12, 1, 12), (2, 20, 3), (8, 8, 9))
"""Tokens of the three documents in each window."""
SLICES = TokenSlices((9, 7, 5, 3))
SIZE = SLICES.num_tokens
MODELS = {
    family: ModelConfig(family=family, num_layers=4, hidden_size=16, num_heads=4, ffn_size=20).resolve(VOCAB)
    for family in ("llama", "gpt2")
}


def windows_of(lengths, rows=None):
    """Windows of documents with these lengths, and the documents."""
    random = np.random.default_rng(0)
    windows = random.integers(VOCAB, size=(rows or len(lengths), sum(lengths[0])))
    documents = []
    for number, row in enumerate(windows):
        begins = np.cumsum([0, *lengths[number % len(lengths)]])[:-1]
        documents += [torch.from_numpy(one) for one in np.split(row.copy(), begins[1:])]
        mark_begins(row, begins)
    return windows, documents


def alone(whole, documents):
    """Loss and gradients of one process that reads each document by itself."""
    total, count = 0.0, sum(len(one) - 1 for one in documents)
    for one in documents:
        if len(one) > 1:
            loss = summed_cross_entropy(whole(one[None, :-1]).flatten(0, 1), one[1:]) / count
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in whole.named_parameters()}


WINDOWED = {
    family: replace(MODELS["llama"], family=family, window=4, head_size=4).resolve(VOCAB)
    for family in ("gemma2", "gemma3")
}

SETTINGS = {"max_positions": SIZE, "seed": 0, "dtype": torch.float64}


@cache
def expected(family):
    model = {**MODELS, **WINDOWED}[family]
    whole = build_stage(model, range(model.num_layers + 2), device="cpu", **SETTINGS)
    return alone(whole, windows_of(LENGTHS)[1])


def worst(schedule, family, *, slices=None, recompute="none"):
    """Largest difference of the loss and of all gradients from those of documents alone."""
    model, number, rows = {**MODELS, **WINDOWED}[family], schedule.num_stages, len(LENGTHS) // schedule.num_microbatches
    pieces = stage_pieces((1,) * (number - 1) + (model.num_layers + 3 - number,))

    def build(stage, device):
        module = build_stage(model, pieces[stage], device=device, **SETTINGS)
        module.set_recompute((recompute,) * model.num_layers)
        return module

    outputs = stage_outputs(lambda stage: build(stage, "meta"), number, TensorSpec((rows, SIZE), torch.int64))
    modules, post, moves = [build(stage, "cpu") for stage in range(number)], Post(), [None] * schedule.num_ranks
    if any(row.is_kind(*MOVE_KINDS).any() for row in schedule.rows):
        lanes, wires = Neighborhood(), MovePost().wires(schedule)
        moves = [ActivationMoves(schedule, rank, InProcessLanes(lanes), wires) for rank in range(schedule.num_ranks)]
    ranks = [
        make_executor(schedule, rank, modules, outputs, post.transport(rank), moves[rank], slices=slices)
        for rank in range(schedule.num_ranks)
    ]
    batch = Batch.of(windows_of(LENGTHS)[0], schedule.num_microbatches, torch.device("cpu"), by_document=True)
    batch = batch if slices is None else batch.cut(slices)
    results = play_in_process(
        [(one, one.steps(batch.inputs, batch.loss, StepDocuments(batch.firsts, schedule.num_slices))) for one in ranks]
    )
    assert not any(stage._seen for one in ranks for stage in one.parts[0].stages.values())
    loss, gradients = expected(family)
    found = {name: p.grad for module in modules for name, p in module.named_parameters()}
    assert found.keys() == gradients.keys()
    total = sum(float(value) for result in results for value in result.outputs.values())
    return max(abs(total - loss), *(float((found[name] - one).abs().max()) for name, one in gradients.items()))


@pytest.mark.parametrize("slices", [None, SLICES], ids=["whole", "slices"])
@pytest.mark.parametrize(("number", "family"), thinned(enumerate(TRAINING), 3))
def test_a_window_of_three_documents_is_three_runs_alone(number, family, slices):
    sizes = {"num_microbatches": 2, "num_slices": 1 if slices is None else 4}
    schedule = lower(make_schedule(family, pp=2, loops=fitting(family, 2)["loops"], **sizes))
    recompute = ("none", "selective", "full")[number % 3]
    for model in MODELS:
        assert worst(schedule, model, slices=slices, recompute=recompute) < 1e-12


@pytest.mark.parametrize("slices", [None, SLICES], ids=["whole", "slices"])
@pytest.mark.parametrize("model", WINDOWED)
def test_so_it_is_with_windows_of_keys_and_soft_caps(model, slices):
    schedule = make_schedule("zb-h1", pp=2, num_microbatches=2, num_slices=1 if slices is None else 4)
    assert worst(lower(schedule), model, slices=slices, recompute="selective") < 1e-12


CHANGES = {
    "1f1b": balance,
    "gpipe": partial(offload, budget_bytes=(3.5, 3.5)),
    "zb-h1": partial(recompute_beyond, room=(1, 1), kept=(1, 1), left=(0, 0)),
}


@pytest.mark.parametrize(("family", "change"), list(CHANGES.items()))
def test_so_it_is_with_moves_and_recomputation(family, change):
    for slices in (None, SLICES):
        sizes = {"num_microbatches": 4, "num_slices": 1 if slices is None else 4}
        schedule = lower(make_schedule(family, pp=2, **sizes))
        assert worst(change(schedule), "llama", slices=slices) < 1e-12


@pytest.mark.parametrize(("family", "sequence_parallel"), thinned(product(SOME, (False, True)), 3))
def test_and_with_tensor_parallelism_over_replicas(family, sequence_parallel):
    layout = Layout(pp=2, tp=2, dp=2, loops=fitting(family, 2)["loops"], num_microbatches=2)
    layout = replace(layout, sequence_parallel=sequence_parallel, shard="full")
    for model in MODELS:
        cluster = TransformerCluster(layout, schedule_of(layout, family, tied=False), model, tied=False)
        windows, documents = windows_of(((2, 3, 2), (1, 5, 1), (4, 2, 1)), layout.dp * 2 * ROWS)
        ranks = []
        for rank, executor in enumerate(cluster.executors):
            own = {"replica": layout.coordinates(rank).data, "num_replicas": 2, "by_document": True}
            batch = Batch.of(windows, 2, torch.device("cpu"), **own)
            of_rank = SplitVocabulary(cluster.teams[rank], VOCAB).summed_cross_entropy
            loss = partial(batch.loss, cross_entropy=of_rank)
            ranks.append((executor, executor.steps(batch.inputs, loss, StepDocuments(batch.firsts))))
        results = play_in_process(ranks, in_turns=True)
        assert batch.inputs[0].shape == (ROWS, NUM_TOKENS)
        total, gradients = alone(cluster.model.whole(), documents)
        found = sum(float(one) for result in results for one in result.outputs.values()) / layout.tp
        assert abs(found - total) < 1e-12
        assert cluster.worst_difference(cluster.whole("gradient"), gradients) < 1e-12


def test_whole_runs_do_too_packed_or_not(tmp_path):
    """Runs of configurations, with real processes: borders are those of the text's documents."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"document {number} " * (1 + number % 4))
    configs = []
    for model, pack, slices in (("llama", "stream", None), ("gpt2", "best-fit", None), ("llama", "best-fit", 3)):
        layout = Layout(pp=2, loops=1, dp=2, num_microbatches=2, microbatch_size=2, token_slices=slices)
        config = small_run(tmp_path, model=replace(MODELS[model], vocab_size=None), layout=layout)
        data = replace(config.data, path=folder, seq_len=24, pack=pack, attention="document")
        configs.append(replace(config, data=data, schedule=ScheduleConfig(family="1f1b")))
    found = differences_over_gloo(configs, 4)
    assert max(max(one.values()) for one in found) < 1e-9
    # The text has borders, which the reference sees from the same batch.
    rows = load_data(configs[0].data, 0).train.batch(0, 8)
    assert torch.cat(Batch.of(rows, 1, torch.device("cpu"), by_document=True).firsts).any()
