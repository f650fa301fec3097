"""Seconds of a transformer's pieces: embedding, layer, head; forward and backward of one micro-batch.

With T tokens in a micro-batch, hidden size H, key width G, inner width F, vocabulary V and t tensor-parallel ranks,
each rank multiplies (m, k, n):

    queries, keys, values   (T, H, (H + 2 G) / t)
    output of attention     (T, H / t, H)
    into the MLP            (T, H, F / t), twice for SwiGLU
    out of the MLP          (T, F / t, H)
    head                    (T, H, V / t)

Backward has two products of the same FLOPs for each, and adds the gradients of the weights to those of the
micro-batches before. What is not a product of matrices is bound by memory, and counted in bytes; what tensor
parallelism leaves whole (norms, residual stream) is divided by t only with sequence parallelism (arXiv 2205.05198,
section 4.2). A piece takes the device's time or the host's time to launch its kernels, whichever is longer.

With a vocabulary of 0 there is no embedding and no head.
"""

from dataclasses import dataclass
from functools import lru_cache

from pipeloom.cost.hardware import Both, Cluster, Group, MeasuredPieces
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run

READS_MORE = 1.5
"""Backward of a kernel that is bound by memory, as a multiple of its forward: a normalization, an activation or a
softmax reads one tensor and writes one, its backward reads two and writes one. Unfused norms: twice, for each step of
theirs has its own backward kernel."""

# Kernels that the host launches: assumptions without a source. They decide how small a piece is when it takes the
# host's time instead of the device's; ``Efficiency.launch`` is calibrated with them.
EMBEDDING_KERNELS = 4
HEAD_KERNELS, HEAD_BACKWARD_KERNELS = 16, 24
"""With the norm before the head, and the loss in single precision."""
SELECTIVE_KERNELS = 4
"""Of attention's core, run again in a backward."""
UNFUSED_NORM_KERNELS = 6

EXPONENTIAL = 48.0
"""What a score's exponential costs in a flash kernel, in elements of a head. A multiprocessor does 16 of them a cycle
beside 2,048 (A100) or 4,096 (H100) operations of its matrix units: 32 and 64 (arXiv 2407.08608, section 3)."""


@dataclass(frozen=True)
class Parts:
    """Seconds of a piece by cause, for one direction of one micro-batch.

    Attributes:
        matmul_s: products with weights.
        attention_s: scores, softmax and weighted sum.
        memory_s: norms, activations, residual stream, dropout, loss.
        tensor_s: tensor-parallel collectives.
        num_kernels: launched by the host.
        num_collectives: tensor-parallel collectives, which cost the host more than a kernel.
    """

    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    tensor_s: float = 0.0
    num_kernels: float = 0.0
    num_collectives: float = 0.0

    def __add__(self, other: "Parts") -> "Parts":
        """Both, one after the other."""
        return Parts(
            self.matmul_s + other.matmul_s,
            self.attention_s + other.attention_s,
            self.memory_s + other.memory_s,
            self.tensor_s + other.tensor_s,
            self.num_kernels + other.num_kernels,
            self.num_collectives + other.num_collectives,
        )

    @property
    def device_s(self) -> float:
        """Seconds of the device."""
        return self.matmul_s + self.attention_s + self.memory_s + self.tensor_s


@dataclass(frozen=True)
class Pieces:
    """The pieces of one run on one cluster with one program.

    Attributes:
        is_dragged: whether stages exchange over nodes, which slows down tensor-parallel collectives of some programs.
        before: tokens of each sequence before those of the run, which attention reads.
    """

    run: Run
    cluster: Cluster
    software: Software
    is_dragged: bool = False
    before: int = 0

    def seconds(self, parts: Parts) -> float:
        """Seconds of a piece: the longer of the device's and the host's."""
        use = self.software.efficiency
        kernels_s = parts.num_kernels * self.cluster.device.launch_s * use.launch
        each_s = use.collective_s + (use.drag_s * self.run.tp if self.is_dragged else 0.0)
        return max(parts.device_s, kernels_s + parts.num_collectives * each_s)

    def layer_forward(self) -> Parts:
        """One layer's forward."""
        return Parts(
            sum(self._matmul_s(*size) for size in self._layer_matmuls()),
            self._attention_forward_s(),
            self._memory_s(self._elementwise_bytes()),
            2 * self._tensor_s(),
            self._num_kernels(),
            2 * self._num_collectives(),
        )

    def layer_backward(self) -> Parts:
        """One layer's backward, with recomputation."""
        run, forward = self.run, self.layer_forward()
        backward = Parts(
            sum(sum(self._matmul_backward_s(*size)) for size in self._layer_matmuls()),
            self._attention_backward_s(),
            self._memory_s(self._elementwise_backward_bytes()) + self.accumulation_s(run.shape.layer_matrix_parameters),
            forward.tensor_s,
            2 * forward.num_kernels,
            # The inputs that sequence parallelism scatters are gathered once more for the gradients of the weights:
            # three collectives for two (arXiv 2205.05198, section 4.2.2).
            forward.num_collectives * (1.5 if self.run.sequence_parallel else 1),
        )
        if self.run.recompute == "full":
            return backward + forward
        if self.run.recompute == "selective":
            return backward + Parts(attention_s=forward.attention_s, num_kernels=SELECTIVE_KERNELS)
        return backward

    def layer_weight_s(self) -> float:
        """Seconds of the weight half of a layer's split backward."""
        products_s = sum(self._matmul_backward_s(*size)[1] for size in self._layer_matmuls())
        return products_s + self.accumulation_s(self.run.shape.layer_matrix_parameters)

    def attention_s(self) -> tuple[float, float]:
        """Seconds of one layer's core of attention, forward and backward, with recomputation."""
        forward_s = self._attention_forward_s()
        again_s = 0.0 if self.run.recompute == "none" else forward_s
        return forward_s, self._attention_backward_s() + again_s

    def head_weight_s(self) -> float:
        """Seconds of the weight half of the head's split backward: the second of its two products."""
        run = self.run
        if not run.shape.vocab:
            return 0.0
        product_s = self._matmul_backward_s(run.tokens, run.shape.hidden, run.shape.vocab / run.tp)[1]
        return product_s + self.accumulation_s(run.shape.embedding_parameters)

    def accumulation_s(self, parameters: float) -> float:
        """Seconds of adding one micro-batch's gradients to those of the micro-batches before it."""
        return self._memory_s(self.software.efficiency.accumulation_bytes * parameters / self.run.tp)

    def embedding_forward(self) -> Parts:
        """A look-up; with tensor parallelism each rank has its part of the vocabulary and the results are summed."""
        run = self.run
        if not run.shape.vocab:
            return Parts()
        moved = run.tokens * run.shape.hidden * run.element_bytes * 3
        return Parts(
            memory_s=self._memory_s(moved),
            tensor_s=self._tensor_s(),
            num_kernels=EMBEDDING_KERNELS,
            num_collectives=self._num_collectives(),
        )

    def embedding_backward(self) -> Parts:
        """Gradients added to the rows that were looked up."""
        forward = self.embedding_forward()
        if not self.run.shape.vocab:
            return forward
        added_s = self.accumulation_s(self.run.shape.embedding_parameters)
        return Parts(memory_s=2 * forward.memory_s + added_s, num_kernels=EMBEDDING_KERNELS)

    def head_forward(self) -> Parts:
        """Final norm, logits and loss in single precision: the logits are written, read, cast, exponentiated."""
        run, vocab = self.run, self.run.shape.vocab / self.run.tp
        if not vocab:
            return Parts()
        is_gathered = self.software.gathers_logits and run.tp > 1
        logits = run.tokens * (run.shape.vocab if is_gathered else vocab)
        moved = logits * self.software.efficiency.loss_bytes
        moved += run.tokens * run.shape.hidden * self._norm_bytes() / self._whole_split()
        gather_s = 0.0
        if is_gathered:
            group = Group.strided(run.tp, 1, self.cluster.devices_per_node)
            use, message = self.software.efficiency, logits * run.element_bytes
            gather_s = self.cluster.collective_s("all_gather", message, group, use.tensor_bus)
        return Parts(
            matmul_s=self._matmul_s(run.tokens, run.shape.hidden, vocab),
            memory_s=self._memory_s(moved),
            tensor_s=gather_s,
            num_kernels=HEAD_KERNELS,
        )

    def head_backward(self) -> Parts:
        """Two products, the loss's gradient, and the sum of the gradient for the head's input."""
        run, forward = self.run, self.head_forward()
        if not run.shape.vocab:
            return forward
        matmul_s = sum(self._matmul_backward_s(run.tokens, run.shape.hidden, run.shape.vocab / run.tp))
        memory_s = forward.memory_s + self.accumulation_s(run.shape.embedding_parameters)
        return Parts(matmul_s, 0.0, memory_s, self._tensor_s(), HEAD_BACKWARD_KERNELS, self._num_collectives())

    def _layer_matmuls(self) -> list[tuple[float, float, float]]:
        run, shape = self.run, self.run.shape
        tokens, hidden, inner = run.tokens, shape.hidden, shape.ffn / run.tp
        into = [(tokens, hidden, inner * shape.family.gates)]
        attention = [
            (tokens, hidden, (hidden + 2 * shape.kv_width) / run.tp),
            (tokens, hidden / run.tp, hidden),
        ]
        return [*attention, *into, (tokens, inner, hidden)]

    def _matmul_s(self, rows: float, inner: float, columns: float) -> float:
        device, use, size = self.cluster.device, self.software.efficiency, self.run.element_bytes
        moved = size * (rows * inner + inner * columns + rows * columns)
        filling = device.filling(rows, columns)
        seconds = device.matmul_s(2 * rows * inner * columns, moved, self.run.precision, use.matmul * filling)
        return seconds + device.kernel_s * (use.kernel - 1)

    def _matmul_backward_s(self, rows: float, inner: float, columns: float) -> tuple[float, float]:
        """Seconds of the products for the input gradient and for the weight gradient."""
        return self._matmul_s(rows, columns, inner), self._matmul_s(inner, rows, columns)

    def _memory_s(self, moved_bytes: float) -> float:
        return self.cluster.device.memory_s(moved_bytes, self.software.efficiency.memory)

    def _whole_split(self) -> int:
        return self.run.tp if self.run.sequence_parallel else 1

    def _norm_bytes(self) -> float:
        """Bytes of one norm's forward for each element of the residual stream."""
        return 2.0 * self.run.element_bytes if self.run.fused_norm else self.software.efficiency.norm_bytes

    def _elementwise_bytes(self) -> float:
        """Bytes of one layer's forward that no product moves, without the scores.

        Whole or split over the sequence: two norms, two residual additions of two reads and a write each, with
        dropout its mask. Over heads: rotation of queries and keys (read and write in single precision), or biases.
        Inner: SwiGLU reads two and writes one, GELU reads one and writes one.
        """
        run, shape, size = self.run, self.run.shape, self.run.element_bytes
        whole = 2 * self._norm_bytes() + 6 * size + (2 if self.software.dropout else 0)
        heads = (shape.hidden + shape.kv_width) * (8 if shape.family.is_rotary else size) + 2 * size * shape.hidden
        inner = shape.family.inner_moved * size * shape.ffn
        return run.tokens * (shape.hidden * whole / self._whole_split() + (heads + inner) / run.tp)

    def _elementwise_backward_bytes(self) -> float:
        run, norms = self.run, 0.0
        if not run.fused_norm:
            norms = 2 * self._norm_bytes() * run.tokens * run.shape.hidden / self._whole_split()
        return 2 * norms + READS_MORE * (self._elementwise_bytes() - norms)

    def _scores(self) -> float:
        """Scores of one layer on a rank; flash kernels leave out half of those within the run's tokens."""
        run, is_flash = self.run, self.run.effective_attention in ("flash1", "flash2")
        seen = run.seq + self.before * (2 if is_flash else 1)
        return run.micro_batch * run.shape.heads / run.tp * run.seq * seen

    def _score_bytes(self) -> float:
        """Bytes moved for each score in the forward: softmax, and dropout with its mask."""
        use = self.software.efficiency
        softmax = use.softmax_bytes if self.run.effective_attention == "plain" else 4.0
        return softmax + (5.0 if self.software.dropout else 0.0)

    def _attention_flops(self) -> float:
        return 4 * self._scores() * self.run.shape.hidden / self.run.shape.heads

    def _attention_forward_s(self) -> float:
        return self._core_forward_s() + self._context_s()

    def _attention_backward_s(self) -> float:
        """Keys and values of earlier tokens are read again, and their gradient is written.

        It is added to that of later tokens, which takes two reads and a write (``pipeloom.model.key_values``).
        """
        return self._core_backward_s() + 5 * self._context_s()

    def _context_s(self) -> float:
        """Seconds of reading the keys and values of earlier tokens once, for any number of queries."""
        run = self.run
        return self._memory_s(2 * run.micro_batch * self.before * run.shape.kv_width / run.tp * run.element_bytes)

    def _core_forward_s(self) -> float:
        """Plain kernels: two batched products over all scores, and softmax; flash: half of them by the mask."""
        use, device = self.software.efficiency, self.cluster.device
        kernel = self.run.effective_attention
        if kernel in ("plain", "fused-softmax"):
            moved = 2 * self.run.element_bytes * self._scores()
            products = 2 * device.matmul_s(
                self._attention_flops() / 2, moved / 2, self.run.precision, use.batched_matmul
            )
            return products + self._memory_s(self._scores() * self._score_bytes())
        rate = device.peak_flops_per_s[self.run.precision] * (use.flash1 if kernel == "flash1" else use.flash2)
        size = self.run.shape.hidden / self.run.shape.heads
        # The calibrated rates are those of heads of 128.
        rate *= (size / (size + EXPONENTIAL)) / (128 / (128 + EXPONENTIAL))
        # Flash kernels leave out the blocks above the diagonal.
        return self._attention_flops() / 2 / rate + device.kernel_s

    def _core_backward_s(self) -> float:
        """Plain: four products for two. Flash: five products for two, with the scores once more (arXiv 2307.08691)."""
        forward_s = self._core_forward_s()
        if self.run.effective_attention in ("plain", "fused-softmax"):
            memory_s = self._memory_s(self._scores() * self._score_bytes())
            return 2 * (forward_s - memory_s) + READS_MORE * memory_s
        return 2.5 * forward_s

    def _tensor_s(self) -> float:
        """One all-reduce of the residual stream, or the equivalent gather and scatter (the same bytes)."""
        run, use = self.run, self.software.efficiency
        if run.tp == 1:
            return 0.0
        group = Group.strided(run.tp, 1, self.cluster.devices_per_node)
        message = run.tokens * run.shape.hidden * run.element_bytes
        if run.sequence_parallel:
            kinds = ("all_gather", "reduce_scatter")
            return sum(self.cluster.collective_s(kind, message, group, use.tensor_bus) for kind in kinds)
        return self.cluster.collective_s("all_reduce", message, group, use.tensor_bus)

    def _num_collectives(self) -> int:
        """Collectives equivalent to one all-reduce."""
        return 0 if self.run.tp == 1 else (2 if self.run.sequence_parallel else 1)

    def _num_kernels(self) -> float:
        """Kernels of one layer's forward: products, norms, rotation, attention, activation, residuals."""
        attention = {"plain": 8, "fused-softmax": 5, "flash1": 2, "flash2": 2}[self.run.effective_attention]
        norms = 2 * (1 if self.run.fused_norm else UNFUSED_NORM_KERNELS)
        rotation = 8 if self.run.shape.family.is_rotary else 2
        return 4 + norms + rotation + attention + 6


@dataclass(frozen=True)
class PieceSeconds:
    """Forward and backward of each kind of piece.

    Attributes:
        embedding, layer, head: seconds on one device for one micro-batch, with tensor-parallel collectives.
        weight_s: of the weight half of a layer's backward.
        head_weight_s: the same of the head's; of the embedding's it is all.
        idle_s: of a layer, in closed forms, those in which the device waits for the host's launches.
        stage: of a stage besides its pieces, where measured.
        message_s: seconds of a core for a message between two stages; 0 where the link determines them.
        is_measured: whether they are from the cluster's file; else they are closed forms.
    """

    embedding: Both
    layer: Both
    head: Both
    weight_s: float
    head_weight_s: float
    idle_s: Both = (0.0, 0.0)
    stage: Both = (0.0, 0.0)
    message_s: float = 0.0
    is_measured: bool = False

    def both_s(self, layers: int) -> list[float]:
        """Seconds of each piece, forward and backward: embedding, ``layers`` equal layers, head."""
        return [sum(self.embedding), *[sum(self.layer)] * layers, sum(self.head)]


def piece_seconds(run: Run, cluster: Cluster, software: Software) -> PieceSeconds:
    """Seconds of the pieces of a run whose layers all recompute ``run.recompute``.

    Measured ones where the cluster's file has exactly these. They depend on the model, the tokens, the kernels and the
    tensor axis, not on the partition.
    """
    # The only fact about the pipeline that pieces depend on: an argument, so that other layouts share the cache.
    is_dragged = run.pp > 1 and run.num_devices > cluster.devices_per_node
    return _piece_seconds(run.of_pieces, cluster, software, is_dragged)


@lru_cache(maxsize=4096)
def _piece_seconds(run: Run, cluster: Cluster, software: Software, is_dragged: bool) -> PieceSeconds:
    pieces = Pieces(run, cluster, software, is_dragged=is_dragged)

    def both(forward: Parts, backward: Parts) -> Both:
        return pieces.seconds(forward), pieces.seconds(backward)

    layer = (pieces.layer_forward(), pieces.layer_backward())
    layer_s = both(*layer)
    counted = PieceSeconds(
        embedding=both(pieces.embedding_forward(), pieces.embedding_backward()),
        layer=layer_s,
        head=both(pieces.head_forward(), pieces.head_backward()),
        weight_s=pieces.layer_weight_s(),
        head_weight_s=pieces.head_weight_s(),
        idle_s=(layer_s[0] - layer[0].device_s, layer_s[1] - layer[1].device_s),
    )
    key = run.of_measured_pieces
    # Searched once for each run, since the result is cached.
    found = next((one for one in cluster.pieces if one.run == key), None)
    return counted if found is None else _measured(found, counted)


def _measured(found: MeasuredPieces, counted: PieceSeconds) -> PieceSeconds:
    """Measured seconds, with backwards split in the proportions of the closed forms, since halves are not measured."""
    return PieceSeconds(
        embedding=found.embedding,
        layer=found.layer,
        head=found.head,
        weight_s=found.layer[1] * counted.weight_s / counted.layer[1],
        head_weight_s=found.head[1] * counted.head_weight_s / counted.head[1],
        stage=found.stage,
        message_s=found.message_s,
        is_measured=True,
    )
