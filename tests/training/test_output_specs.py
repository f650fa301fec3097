"""The specs of stage outputs, which are computed, are those of stages that run on the meta device."""

from itertools import product

import pytest
import torch
from stage_outputs import stage_outputs

from pipeloom.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.collectives import TensorGroup
from pipeloom.model import TensorParallel, stage_pieces
from pipeloom.training.stages import output_specs, stage_of
from pipeloom.workload.layout import Layout
from pipeloom.workload.model_families import MODELS


@pytest.mark.parametrize("family", sorted(MODELS))
def test_computed_specs_are_those_of_the_stages(family):
    model = ModelConfig(family=family, num_layers=2, hidden_size=32, num_heads=4).resolve(257)
    for (tp, is_split), dtype in product(((1, False), (2, False), (2, True)), ("float32", "bfloat16")):
        config = RunConfig(
            model=model,
            data=DataConfig(seq_len=16),
            layout=Layout(pp=3, tp=tp, sequence_parallel=is_split, microbatch_size=3, partition=(1, 2, 1)),
            training=TrainingConfig(dtype=dtype),
        )
        pieces = stage_pieces(config.layout.partition)
        for rank in range(tp):
            parallel = TensorParallel(TensorGroup(tp, rank), is_split)
            build = [stage_of(config, some, "meta", parallel=parallel) for some in pieces]
            found = stage_outputs(build.__getitem__, 3, TensorSpec((3, 16), torch.int64))
            between, logits = output_specs(config, parallel, 3, 16)
            assert found == (between, between, logits)
