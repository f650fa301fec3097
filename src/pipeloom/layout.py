"""The layout: axis sizes of a run and how its batch is cut. No process groups."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes and of the batch."""

    pp: int = 4
    """Pipeline ranks: processes that the stages are spread over."""
    loops: int = 2
    """Stages on each pipeline rank. More loops, smaller bubble: on a looped placement (pp - 1) / (num_microbatches *
    loops) of the ideal time."""
    num_microbatches: int = 8
    """Micro-batches of a step. At least pp; a little above it hides the transfers between ranks."""
    microbatch_size: int = 2
    """Sequences of a micro-batch."""
    partition: tuple[int, ...] | None = None
    """Pieces of each stage, in order, where the pieces are the embedding, each layer, and the head. None balances
    their cost."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.loops

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return self.pp

    @property
    def batch_size(self) -> int:
        """Sequences of a step."""
        return self.num_microbatches * self.microbatch_size
