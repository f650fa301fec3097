"""Seconds that were measured: of a model's pieces, of messages between its stages, of updating its weights.

Where a host has fewer cores than processes, everything here is in seconds of a core: the CPU time that the process
takes while all processes are at work. What ranks wait for each other is then left to others, and the simulator shares
the cores out (``pipeloom.predict.links``).
"""

from dataclasses import dataclass, fields

from pipeloom.cost.shape import ModelShape, Precision, Run
from pipeloom.workload.layout import Recompute

Both = tuple[float, float]
"""Seconds of a forward and of a backward."""


@dataclass(frozen=True, kw_only=True)
class PieceKey:
    """What the seconds of a piece depend on.

    Attributes:
        hidden, heads, kv_heads, ffn, mlp, vocab: sizes of the model (``ModelShape``); how many layers there are does
            not matter.
        seq: tokens of a sequence.
        tp, sequence_parallel: ranks that share each matrix, and whether they share the tokens of the rest.
        micro_batch: sequences of a micro-batch.
        recompute: what a layer's backward computes again.
        precision: of weights and activations.
    """

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    mlp: str
    vocab: int
    seq: int
    tp: int
    sequence_parallel: bool
    micro_batch: int
    recompute: Recompute
    precision: Precision

    @classmethod
    def of(cls, run: Run) -> "PieceKey":
        """The key of a run whose layers all recompute ``run.recompute``."""
        sizes = {name: getattr(run.shape, name) for name in SHAPE_KEYS}
        own = {item.name: getattr(run, item.name) for item in fields(cls) if item.name not in SHAPE_KEYS}
        return cls(**sizes, **own)


SHAPE_KEYS = ("hidden", "heads", "kv_heads", "ffn", "mlp", "vocab")
assert set(SHAPE_KEYS) <= {item.name for item in fields(ModelShape)}


@dataclass(frozen=True, kw_only=True)
class MeasuredPieces:
    """A model's pieces as they were measured.

    Attributes:
        key: of what.
        embedding, layer, head: seconds for one micro-batch, with tensor-parallel exchanges.
        stage: seconds of a stage beside its pieces.
        message_s: seconds of a core that a message between two stages takes at both ends together; 0 where cores are
            not shared, so that the link tells.
    """

    key: PieceKey
    embedding: Both
    layer: Both
    head: Both
    stage: Both = (0.0, 0.0)
    message_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredUpdate:
    """What follows a step's pipeline, as it was measured: gradients to zero, their norm, clipping, the optimizer.

    Attributes:
        fixed_s: seconds of a rank whatever it holds.
        parameter_s: seconds for each parameter that the rank updates.
        precision: of weights and activations.
    """

    fixed_s: float
    parameter_s: float
    precision: Precision

    def seconds(self, parameters: float) -> float:
        """Of a rank that updates so many."""
        return self.fixed_s + self.parameter_s * parameters
