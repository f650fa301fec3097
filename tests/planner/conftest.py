"""Questions small enough to answer by simulating everything."""

import pytest

from pipeloom.catalog import load_cluster, load_software
from pipeloom.planner.question import Question
from pipeloom.workload.model import ModelShape

SMALL = ModelShape(
    layers=6, hidden=1024, heads=8, kv_heads=8, ffn=4096, family="gpt2", vocab=32_000, tied=False, name="small"
)


@pytest.fixture
def ask():
    """A question about a small model on four V100, with changed fields."""

    def make(**changes):
        defaults = {
            "shape": SMALL,
            "cluster": load_cluster("dgx-1-v100"),
            "software": load_software("pipeloom"),
            "num_devices": 4,
            "global_batch": 8,
            "seq": 512,
            "precision": "fp16",
        }
        return Question(**(defaults | changes))

    return make
