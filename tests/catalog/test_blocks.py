"""Kept blocks in files of the catalog's format: of models, and of measured layers."""

from dataclasses import replace

import pytest

from pipeloom.catalog import cluster_to_toml, load_cluster, load_model, read_model
from pipeloom.config import ModelConfig
from pipeloom.cost.measured import MeasuredPieces
from pipeloom.errors import ConfigError, UserError
from pipeloom.workload.model_shape import Blocks, ModelShape
from pipeloom.workload.run import Run

TEXT = 'name = "m"\nfamily = "llama"\nlayers = 2\nhidden = 256\nheads = 4\nffn = 512\nvocab = 300\ntied = false\n'


def model_file(folder, more):
    file = folder / "model.toml"
    file.write_text(TEXT + more)
    return str(file)


def test_a_model_file_may_have_a_density(tmp_path):
    file = read_model(model_file(tmp_path, "density = 0.25\n"))
    assert file.shape.blocks == Blocks(density=0.25, size=64)
    assert file.over(ModelConfig()).blocks == file.shape.blocks
    dense = read_model(model_file(tmp_path, ""))
    assert file.shape.layer_matrix_parameters == dense.shape.layer_matrix_parameters / 4
    # A file of dense matrices has no effect on the density.
    assert dense.over(ModelConfig(density=0.5)).density == 0.5


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("density = 0.2\n", "density 0.2 does not fit"),
        ("density = 1.5\n", "density must be below 1, found 1.5"),
        ("density_block = 16\n", "density_block"),
        ("density = 0.25\nexperts = 4\n", "density and experts do not work together"),
    ],
)
def test_wrong_densities_of_a_file_are_named(tmp_path, more, sentence):
    with pytest.raises((ConfigError, UserError), match=sentence):
        load_model(model_file(tmp_path, more))


def test_measured_layers_keep_their_blocks(tmp_path):
    blocks = Blocks(density=0.25, size=32)
    shape = ModelShape(
        layers=1, hidden=256, heads=4, kv_heads=4, ffn=512, family="llama", vocab=300, tied=False, blocks=blocks
    )
    cluster = load_cluster("laptop")
    run = Run(shape=shape, seq=64, precision="fp32").of_measured_pieces
    pair = (1e-3, 2e-3)
    found = MeasuredPieces(run=run, embedding=pair, layer=pair, head=pair, stage=pair)
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_to_toml(replace(cluster, pieces=(found,))))
    assert load_cluster(str(file)).pieces[0].run == run
