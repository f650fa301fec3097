"""Context parallelism: keys and values go around the ranks of the context axis, beside attention.

With c ranks the tokens of a sequence are 2 c equal parts, and rank r has parts r and 2 c - 1 - r: each rank then has as
many scores below the causal mask with the keys of every rank (ring attention, arXiv 2310.01889, with the balance of
Megatron-LM's context parallelism). In c steps a rank computes attention of its queries with the keys and values that it
has, while it sends these to the next rank. In a backward the gradients of keys and values follow them, one step behind,
and return to their rank after the last step.
"""

from dataclasses import dataclass

from pipeloom.cost.hardware import Cluster, Group
from pipeloom.cost.measured import Both
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run

_WIDE_BYTES = 4
"""Bytes of a number in single precision, in which partial results are added up."""
_PASSES = 2
"""Times that an accumulated number is moved when another is added to it: read and written."""


@dataclass(frozen=True)
class Ring:
    """The exchange of one layer's keys and values, for one micro-batch.

    Attributes:
        run: model and layout.
        cluster: the rank's part of it.
        software: the training program.
    """

    run: Run
    cluster: Cluster
    software: Software

    def busy_s(self) -> Both:
        """Seconds of the link, forward and backward."""
        both = (self._forward_tensors, self._backward_tensors)
        forward_s, backward_s = (sum(map(self._hop_s, tensors)) for tensors in both)
        return forward_s, backward_s + self._last_hop_s

    def exposed_s(self, forward_s: float, backward_s: float) -> Both:
        """Seconds of the exchange that attention does not hide, forward and backward.

        Args:
            forward_s: of the core of attention, in all steps of the ring.
            backward_s: the same of its backward.
        """
        return (
            self._beyond_s(self._forward_tensors, forward_s),
            self._beyond_s(self._backward_tensors, backward_s) + self._last_hop_s,
        )

    def added_bytes(self) -> Both:
        """Bytes that adding up the steps' partial results moves, forward and backward.

        Forward: the output. Backward: the gradients of queries, keys and values.
        """
        run, shape = self.run, self.run.shape
        each = _PASSES * _WIDE_BYTES + run.element_bytes
        steps = (run.cp - 1) * run.tokens / run.tp * each
        return steps * shape.query_width, steps * (shape.query_width + 2 * shape.kv_width)

    @property
    def _forward_tensors(self) -> list[int]:
        """For each step the pairs of tensors under way beside it: keys and values, except beside the last."""
        return [1] * (self.run.cp - 1) + [0]

    @property
    def _backward_tensors(self) -> list[int]:
        """The same in the backward: from the third step on, also their gradients, from all steps but a rank's own."""
        return [pairs + (step >= 2) for step, pairs in enumerate(self._forward_tensors)]

    @property
    def _last_hop_s(self) -> float:
        """Seconds in which gradients of keys and values return to their rank, beside nothing."""
        return self._hop_s(1) if self.run.cp > 1 else 0.0

    def _beyond_s(self, tensors: list[int], compute_s: float) -> float:
        """Seconds in which steps wait for what is under way beside them."""
        each_s = compute_s / len(tensors)
        return sum(max(0.0, self._hop_s(pairs) - each_s) for pairs in tensors)

    def _hop_s(self, pairs: int) -> float:
        """Seconds of passing so many pairs of tensors to the next rank."""
        if pairs == 0:
            return 0.0
        run, cluster = self.run, self.cluster
        # Tensor-parallel ranks are adjacent, so neighbors of a ring have a stride of ``tp``.
        is_inside = Group.strided(run.cp, run.tp, cluster.devices_per_node).num_nodes == 1
        # Only the ranks at the border of a node send to another one, those of one place on the tensor axis each.
        sharing, use = cluster.sharing(run.tp), self.software.efficiency
        return cluster.p2p_s(pairs * _pair_bytes(run), is_inside=is_inside, sharing=sharing, efficiency=use.p2p)


def _pair_bytes(run: Run) -> float:
    """Bytes of the keys and the values of a rank."""
    return 2 * run.tokens * run.shape.kv_width / run.tp * run.element_bytes


def ring_buffer_bytes(run: Run) -> float:
    """Bytes of buffers while a layer's attention is in its backward; 0 without a context axis.

    Keys and values that it computes with and those that arrive, their gradients the same, and the gradient of the
    queries in single precision.
    """
    if run.cp == 1:
        return 0.0
    return 4 * _pair_bytes(run) + _WIDE_BYTES * run.tokens * run.shape.query_width / run.tp
