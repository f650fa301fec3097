"""Plans and predictions of models whose matrices consist of blocks."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import pytest

from pipeloom import make_question, plan
from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.flops import piece_forward_flops, seen_per_token, shape_model_flops
from pipeloom.cost.memory import kept_bytes, state_bytes
from pipeloom.cost.placed import Placed
from pipeloom.cost.products import GATHER_SLOWDOWN, gathered_bytes, layer_products
from pipeloom.cost.stages import stage_parameters
from pipeloom.errors import ConfigError
from pipeloom.planner.run_file import run_config
from pipeloom.workload.model_shape import Blocks
from pipeloom.workload.run import Run

BLOCKS = Blocks(density=0.125, size=64)
DENSE = replace(load_model("llama-3-8b"), layers=8, hidden=1024, heads=16, ffn=4096, name="dense")
SPARSE = replace(DENSE, blocks=BLOCKS, name="sparse")
FEW = replace(DENSE, blocks=Blocks(density=0.125, size=128))
"""With larger blocks, which gather half as much for the same products."""
PIPELOOM = load_software("pipeloom")


def question(shape=SPARSE, **limits):
    return make_question(shape, "dgx-h100", num_devices=8, global_batch=32, seq=2048, **limits)


def runs(**changes):
    return [Run(shape=shape, seq=2048, micro_batch=2, **changes) for shape in (DENSE, SPARSE)]


def test_matrices_have_the_part_of_the_density_everywhere():
    matrices = DENSE.layers * DENSE.layer_matrix_parameters
    lost = matrices * (1 - BLOCKS.density)
    assert DENSE.parameters - SPARSE.parameters == lost
    assert shape_model_flops(DENSE, 2048) - shape_model_flops(SPARSE, 2048) == 6 * lost
    of_layers = [sum(piece_forward_flops(shape, 2048)[1:-1]) for shape in (DENSE, SPARSE)]
    scores = 2 * SPARSE.query_width * sum(seen_per_token(SPARSE, 2048))
    assert of_layers[1] - scores == pytest.approx(BLOCKS.density * (of_layers[0] - scores))
    software = load_software("pipeloom")
    for dense, sparse in (runs(pp=2, loops=2, dp=2, shard=shard) for shard in ("none", "optimizer", "full")):
        held = [stage_parameters(one, software) for one in (dense, sparse)]
        assert sum(held[0]) - sum(held[1]) == lost
        # What is sent in gathers and reductions is what is held.
        bytes_of = [
            state_bytes(one, sum(own), software).total_bytes for one, own in zip((dense, sparse), held, strict=True)
        ]
        assert bytes_of[1] / bytes_of[0] == pytest.approx(sum(held[1]) / sum(held[0]))
        assert kept_bytes(dense, software) == kept_bytes(sparse, software)


def test_products_take_the_part_and_gathering_takes_bytes():
    dense, sparse = runs()
    for whole, kept in zip(layer_products(dense), layer_products(sparse), strict=True):
        assert kept == (whole[0], whole[1] / 8, whole[2])
    # Queries, keys and values; output; gate and up; down: outputs / 64 rows, with an eighth of the inputs for each.
    inputs = 1024 * (1024 + 2 * 512 + 1024 + 2 * 4096) + 4096 * 1024
    assert gathered_bytes(dense, "output") == 0
    assert gathered_bytes(sparse, "output") == 3 * sparse.tokens * inputs / 8 / 64 * sparse.element_bytes
    assert load_cluster("dgx-h100").device.is_gpu


def test_gathering_on_a_core_takes_as_long_as_in_measured_products():
    device, slowdowns = load_cluster("laptop").device, []
    with (Path(__file__).parents[2] / "docs/reproduction/sparse_products.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    for row in rows:
        numbers = 512 * row["inputs"] * row["density"] * row["outputs"] / row["block"]
        copies_s = device.memory_s((3 + 4 + 3) * 4 * numbers)
        product_s, took_s = row["density"] * row["dense_ms"] / 1e3, row["sparse_ms"] / 1e3
        slowdowns.append((took_s - product_s) / copies_s)
        assert product_s + GATHER_SLOWDOWN * copies_s == pytest.approx(took_s, rel=0.2)
    assert geometric_mean(slowdowns) == pytest.approx(GATHER_SLOWDOWN, rel=0.02)


@pytest.mark.parametrize(("cluster", "slowdown"), [("laptop", GATHER_SLOWDOWN), ("dgx-h100", 1.0)])
def test_a_layer_gathers_at_the_rate_of_its_device(cluster, slowdown):
    placed = Placed(Run(shape=SPARSE, seq=2048, micro_batch=2, precision="fp32"), load_cluster(cluster), PIPELOOM)
    pieces, bare = (replace(placed, run=run).pieces[0] for run in (placed.run, replace(placed.run, shape=FEW)))
    gathered = [gathered_bytes(run, "weight") for run in (placed.run, replace(placed.run, shape=FEW))]
    more_s = slowdown * placed.cluster.device.memory_s(gathered[0] - gathered[1], PIPELOOM.efficiency.memory)
    assert pieces.weight_s - bare.weight_s == pytest.approx(more_s)


def test_a_plan_is_the_run_that_its_file_trains_without_a_tensor_axis():
    found = plan(question(pp=(2,)), explains=False)
    assert found.best.run.tp == 1
    config = run_config(found.best, None, "dgx-h100", "pipeloom")
    assert config.model.blocks == BLOCKS
    with pytest.raises(ConfigError, match="model.density needs the training program pipeloom"):
        make_question(SPARSE, "dgx-h100", num_devices=8, global_batch=32, seq=2048, software="megatron-core")
