"""Seconds of a transformer's pieces: embedding, layer, head; forward and backward of one micro-batch.

With T tokens in a micro-batch, hidden size H, query width Q, key width G, inner width F, vocabulary V and t
tensor-parallel ranks, each rank multiplies (m, k, n):

    queries, keys, values   (T, H, (Q + 2 G) / t)
    output of attention     (T, Q / t, H)
    into the MLP            (T, H, F / t), twice for SwiGLU
    out of the MLP          (T, F / t, H)
    head                    (T, H, V / t)

With ``Run.products`` the products of layers have operands of one byte, which are cast before (arXiv 2209.05433, and
Transformer Engine): the inputs in a forward, the gradients of the outputs in a backward. The weights are cast once a
step, which is not counted. Scores, head and embedding stay in ``Run.precision``.

The backward has two products of the same FLOPs for each of these, and accumulates the gradients of the weights over
micro-batches. All other kernels are limited by memory bandwidth and counted in bytes. Norms and residual stream are
divided by t only with sequence parallelism (arXiv 2205.05198, section 4.2). A piece takes the device's time, or the
host's time to launch its kernels if that is longer.

With a vocabulary of 0 there is no embedding and no head. With kept blocks (``ModelShape.blocks``) the inner sizes of a
layer's products are multiplied by the density, and their inputs are gathered (``products.gathered_bytes``).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, gcd
from statistics import fmean

from pipeloom.cost.collectives import inner_exchanges, together_s
from pipeloom.cost.flops import seen
from pipeloom.cost.hardware import Cluster, Collective, Group
from pipeloom.cost.measured import Both
from pipeloom.cost.parts import Parts
from pipeloom.cost.products import (
    ALIGNED,
    GATHER_SLOWDOWN,
    BlockProduct,
    adapter_products,
    expert_bytes,
    expert_products,
    gathered_bytes,
    layer_products,
    more_kernels,
    operand_bytes,
    product_s,
    router_products,
)
from pipeloom.cost.ring import Ring
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run

READS_MORE = 1.5
"""Bytes of the backward of a memory-bound kernel / those of its forward: a norm, activation or softmax reads one tensor
and writes one, its backward reads two and writes one. For unfused norms 2, since each of their steps has its own
backward kernel."""

# Numbers of kernels that the host launches: assumptions without a source. They determine below which size a piece takes
# the host's time instead of the device's; ``Efficiency.launch`` is calibrated with them.
EMBEDDING_KERNELS = 4
HEAD_KERNELS, HEAD_BACKWARD_KERNELS = 16, 24
"""Including the norm before the head, and the loss in single precision."""
SELECTIVE_KERNELS = 4
"""Of the core of attention, recomputed in a backward."""
UNFUSED_NORM_KERNELS = 6

EXPONENTIAL = 48.0
"""Time of a score's exponential in a flash kernel, in elements of a head: between 32 (A100) and 64 (H100). Per cycle, a
multiprocessor computes 16 exponentials, or 2,048 (A100) or 4,096 (H100) operations in its matrix units (arXiv
2407.08608, section 3). FlashAttention-1, and kernels like it, are as fast with heads of 64 as with 128: others of their
steps limit them (arXiv 2307.08691, figures 4 to 6)."""
WRITTEN_SCORE = 48.0
"""Time to write and read a score, in elements of a head, for the batched products of plain kernels: one product writes
it and the other reads it, 4 bytes beside 4 operations for each element of a head, at the general rates of an A100
(97e12 operations and 2.04e12 bytes a second)."""
RANDOM_NUMBERS = 2.0
"""Time of dropout of scores / the time to move its bytes, since each element takes a random number of several rounds of
integer operations. The multiple is what steps of two models of arXiv 2401.10241 show, which differ in the scores for
each matrix product; without it their shared rates of memory and products contradict each other."""

WIDEST_LOAD_BYTES = 16
"""Bytes that a thread loads at once into shared memory are 4, 8 or 16, by the alignment of rows (PTX ISA, cp.async)."""


@dataclass(frozen=True)
class Pieces:
    """The pieces of one run on one cluster with one program; a layer is the mean of layers with different windows.

    Attributes:
        is_dragged: whether stages communicate between nodes, which delays tensor-parallel collectives of some programs
            (``Efficiency.drag_s``).
        before: earlier tokens of each sequence that attention reads, for token slices.
    """

    run: Run
    cluster: Cluster
    software: Software
    is_dragged: bool = False
    before: int = 0

    def seconds(self, parts: Parts) -> float:
        """Seconds of a piece: the maximum of the device's and the host's."""
        use = self.software.efficiency
        kernels_s = parts.num_kernels * self.cluster.device.launch_s * use.launch
        each_s = use.collective_s + (use.drag_s * self.run.tp if self.is_dragged else 0.0)
        if self.software.is_composed:  # the host launched the profiled kernels, not the exchanges
            return max(parts.device_s - parts.tensor_s, kernels_s) + parts.tensor_s
        return max(parts.device_s, kernels_s + parts.num_collectives * each_s)

    def layer_forward(self) -> Parts:
        """One layer's forward."""
        (forth, forth_s), _ = inner_exchanges(self.run, self.cluster, self.software)
        return Parts(
            self._each_product(self.product_s),
            self._attention_forward_s(),
            self._memory_s(self._elementwise_bytes() + self._operand_bytes(0)) + self._gather_s("output"),
            2 * self._tensor_s() + forth_s,
            self._num_kernels(),
            2 * self._num_collectives() + forth,
        )

    def layer_backward(self) -> Parts:
        """One layer's backward, including recomputation."""
        forward = self.layer_forward()
        _, (back, back_s) = inner_exchanges(self.run, self.cluster, self.software)
        backward = Parts(
            self._each_product(self._input_s) + self.layer_weight_s(),
            self._attention_backward_s(),
            self._memory_s(self._elementwise_backward_bytes() + self._operand_bytes(1)) + self._gather_s("input"),
            self._backward_tensor_s() + back_s,
            2 * forward.num_kernels,
            # Sequence parallelism gathers inputs again for the gradients of the weights: three collectives instead of
            # two (arXiv 2205.05198, section 4.2.2).
            2 * self._num_collectives() * (1.5 if self.run.sequence_parallel else 1) + back,
        )
        return backward + self._again(forward)

    def _again(self, forward: Parts) -> Parts:
        """What a layer's backward recomputes of its forward."""
        if self.run.recompute == "full" and not self.software.is_composed:
            return forward
        if self.run.recompute != "selective":
            return Parts()
        if share := self.software.selective_share:
            return replace(
                forward,
                matmul_s=forward.matmul_s * share,
                attention_s=0.0,
                tensor_s=forward.tensor_s * share,
                num_collectives=forward.num_collectives * share,
            )
        return Parts(attention_s=forward.attention_s, num_kernels=SELECTIVE_KERNELS)

    def _operand_bytes(self, direction: int) -> float:
        return operand_bytes(self.run, direction, is_fused=self.software.fuses_casts)

    def _gather_s(self, which: BlockProduct) -> float:
        slowdown = 1.0 if self.cluster.device.is_gpu else GATHER_SLOWDOWN
        return slowdown * self._memory_s(gathered_bytes(self.run, which))

    def layer_weight_s(self) -> float:
        """Seconds of the weight half of a layer's split backward."""
        if self.run.adapter is not None:
            return sum(self._weight_s(*size) for size in adapter_products(self.run))
        return self._each_product(self._weight_s) + self._gather_s("weight")

    def _each_product(self, seconds: Callable[[float, float, float], float]) -> float:
        """Sum of ``seconds`` of a layer's products, those of experts and adapters included."""
        number, of_expert = expert_products(self.run)
        others = (*layer_products(self.run), *router_products(self.run), *adapter_products(self.run))
        return sum(seconds(*size) for size in others) + number * sum(seconds(*size) for size in of_expert)

    def experts_s(self) -> float:
        """Seconds of the products of a layer's experts in a forward, without shared ones."""
        number, products = expert_products(self.run)
        return number * sum(self.product_s(*size) for size in products)

    def _weight_s(self, rows: float, inner: float, columns: float) -> float:
        """Seconds of the product for a weight gradient, and of adding it to the gradients of earlier micro-batches."""
        product_s = self.product_s(inner, rows, columns)
        added_s = self.accumulation_s(inner * columns * self.run.tp)
        return max(product_s, added_s) if self.software.fuses_accumulation else product_s + added_s

    def attention_s(self) -> tuple[float, float]:
        """Seconds of the core of one layer's attention, forward and backward, including recomputation."""
        forward_s = self._attention_forward_s()
        again_s = 0.0 if self.run.recompute == "none" else forward_s
        return forward_s, self._attention_backward_s() + again_s

    def head_weight_s(self) -> float:
        """Seconds of the weight half of the head's split backward: the second of its two products."""
        if self.run.products:
            return self._wide.head_weight_s()
        run = self.run
        is_trained = run.shape.vocab and run.adapter is None
        return self._weight_s(run.tokens, run.shape.hidden, self._vocabulary) if is_trained else 0.0

    def accumulation_s(self, parameters: float) -> float:
        """Seconds of adding one micro-batch's gradients of ``parameters`` to the accumulated ones."""
        return self._memory_s(self.software.efficiency.accumulation_bytes * parameters / self.run.tp)

    def embedding_forward(self) -> Parts:
        """A lookup; with tensor parallelism in a part of the vocabulary, and a sum over the ranks."""
        run = self.run
        if not run.shape.vocab:
            return Parts()
        # A lookup reads and writes, and adds to the gradient or the positions; a factor reads and writes once more.
        moved = run.tokens * run.shape.hidden * run.element_bytes * (5 if run.shape.kind.scales_embedding else 3)
        return Parts(
            memory_s=self._memory_s(moved),
            tensor_s=self._tensor_s(),
            num_kernels=EMBEDDING_KERNELS,
            num_collectives=self._num_collectives(),
        )

    def embedding_backward(self) -> Parts:
        """Addition of gradients to rows of the embedding."""
        forward = self.embedding_forward()
        if not self.run.shape.vocab:
            return forward
        added_s = self.accumulation_s(self.run.shape.embedding_parameters)
        return Parts(memory_s=2 * forward.memory_s + added_s, num_kernels=EMBEDDING_KERNELS)

    def head_forward(self) -> Parts:
        """Final norm, logits, and the loss in single precision."""
        if self.run.products:
            return self._wide.head_forward()
        run, vocab = self.run, self._vocabulary
        if not vocab:
            return Parts()
        is_gathered = self.software.gathers_logits and run.tp > 1
        logits = run.tokens * (run.shape.vocab if is_gathered else vocab)
        moved = logits * self.software.efficiency.loss_bytes
        if run.shape.logit_softcap:  # a quotient, its tanh, a product
            moved += 6 * run.element_bytes * logits
        moved += run.tokens * run.shape.hidden * self._norm_bytes() / self._whole_split()
        gather_s = 0.0
        if is_gathered:
            group = Group.strided(run.tp, 1, self.cluster.devices_per_node)
            use, message = self.software.efficiency, logits * run.element_bytes
            gather_s = self.cluster.collective_s("all_gather", message, group, use.tensor_bus)
        return Parts(
            matmul_s=self.product_s(run.tokens, run.shape.hidden, vocab),
            memory_s=self._memory_s(moved),
            tensor_s=gather_s,
            num_kernels=HEAD_KERNELS,
        )

    @property
    def _vocabulary(self) -> float:
        """Rows of the vocabulary on a tensor-parallel rank, with padding."""
        share = self.run.shape.vocab / self.run.tp
        return ceil(share / ALIGNED) * ALIGNED if self.software.pads_vocabulary else floor(share)

    def head_backward(self) -> Parts:
        """Two products, the gradient of the loss, and the sum over ranks of the gradient of the head's input."""
        if self.run.products:
            return self._wide.head_backward()
        run, forward = self.run, self.head_forward()
        if not run.shape.vocab:
            return forward
        matmul_s = self._input_s(run.tokens, run.shape.hidden, self._vocabulary)
        return Parts(
            matmul_s + self.head_weight_s(),
            0.0,
            forward.memory_s,
            self._tensor_s(),
            HEAD_BACKWARD_KERNELS,
            self._num_collectives(),
        )

    @property
    def _wide(self) -> "Pieces":
        """The pieces without narrow products."""
        return replace(self, run=replace(self.run, products=None)) if self.run.products else self

    def product_s(self, rows: float, inner: float, columns: float) -> float:
        """Seconds of a product."""
        return product_s(self.run, self.cluster.device, self.software.efficiency, (rows, inner, columns))

    def _input_s(self, rows: float, inner: float, columns: float) -> float:
        """Seconds of the product for an input gradient; ``_weight_s`` has that for the weight gradient."""
        return self.product_s(rows, columns, inner)

    def _memory_s(self, moved_bytes: float) -> float:
        return self.cluster.device.memory_s(moved_bytes, self.software.efficiency.memory)

    def _whole_split(self) -> int:
        return self.run.tp if self.run.sequence_parallel else 1

    def _norm_bytes(self) -> float:
        """Bytes that one norm's forward moves per element of the residual stream."""
        return 2.0 * self.run.element_bytes if self.run.fused_norm else self.software.efficiency.norm_bytes

    def _norms_bytes(self) -> float:
        """Bytes that the norms of one layer's forward move, those of queries and keys included."""
        shape = self.run.shape
        heads = (shape.query_width + shape.kv_width) / self.run.tp if shape.kind.qk_norm != "none" else 0.0
        return (
            self._norm_bytes() * self.run.tokens * (shape.kind.layer_norms * shape.hidden / self._whole_split() + heads)
        )

    def _elementwise_bytes(self) -> float:
        """Bytes that one layer's forward moves outside matrix products and scores.

        Residual stream: its norms, two additions with two reads and a write each, dropout masks. Heads: rotation of
        queries and keys (a read and a write in single precision), or biases. Inner: SwiGLU reads two tensors and writes
        one, GELU reads one and writes one.
        """
        run, shape, size = self.run, self.run.shape, self.run.element_bytes
        whole = 6 * size + (2 if self.software.dropout else 0)
        queries = shape.query_width
        heads = (queries + shape.kv_width) * (8 if shape.kind.is_rotary else size) + 2 * size * queries
        inner = shape.kind.inner_moved * size * shape.inner
        return (
            self._norms_bytes()
            + expert_bytes(run)
            + run.tokens * (shape.hidden * whole / self._whole_split() + (heads + inner) / run.tp)
        )

    def _elementwise_backward_bytes(self) -> float:
        run, norms = self.run, 0.0
        if not run.fused_norm:
            norms = self._norms_bytes()
        return 2 * norms + READS_MORE * (self._elementwise_bytes() - norms)

    def _scores(self) -> float:
        """Number of scores of one layer on a rank.

        For flash kernels, twice the scores that remain, since their products are halved for the causal mask. Others
        compute all scores with keys up to the last query, also those outside of a window.
        """
        run = self.run
        computed = self._all_scores
        if run.effective_attention in ("flash1", "flash2"):
            by_window = Counter(run.shape.windows)
            twice = (count * 2 * self._remaining(window) for window, count in by_window.items())
            computed = sum(twice) / run.shape.layers
        return run.micro_batch * run.shape.heads / (run.tp * run.cp) * computed

    def _remaining(self, window: int | None) -> float:
        """Scores of a sequence and a head that a flash kernel computes in a layer with this window."""
        return self._all_scores if self._has_mask(window) else seen(self.run.seq, window, self.before)

    @property
    def _all_scores(self) -> float:
        return float(self.run.seq * (self.run.seq + self.before))

    def _masked_scores(self) -> float:
        """Scores of one layer on a rank to which a mask is added."""
        run = self.run
        share = fmean(self._has_mask(window) for window in run.shape.windows) if run.by_document else 0.0
        return run.micro_batch * run.shape.heads / (run.tp * run.cp) * self._all_scores * share

    def _score_bytes(self) -> float:
        """Bytes moved per score in the forward: softmax, and dropout with its mask."""
        use, size = self.software.efficiency, self.run.element_bytes
        is_fused = self.run.effective_attention != "plain" or self.software.fuses_softmax
        softmax = 2.0 * size if is_fused else use.softmax_bytes
        return softmax + (RANDOM_NUMBERS * (2.0 * size + 1.0) if self.software.dropout else 0.0)

    def _has_mask(self, window: int | None) -> bool:
        """Whether documents have a mask in layers with this window: on CPUs, if the kernel is not that of windows.

        It has a product of every score, however short documents are. On GPUs the kernel skips keys; how many depends on
        the text.
        """
        is_fused = self.run.shape.has_fused_attention(window, self.before + self.run.seq)
        return self.run.by_document and not self.cluster.device.is_gpu and is_fused

    def _attention_flops(self) -> float:
        return 4 * self._scores() * self.run.shape.head_size

    def _attention_forward_s(self) -> float:
        return self._core_forward_s() + self._context_s() + self.ring_s(0)

    def _attention_backward_s(self) -> float:
        """Seconds of the core's backward, including keys and values of earlier tokens.

        They are read, and their gradients are written and added to those of later slices, which takes two reads and a
        write (``pipeloom.model.key_values``), of all of them, also outside of a window.
        """
        return self._core_backward_s() + self._context_s() + 4 * self._tokens_s(self.before) + self.ring_s(1)

    def ring_s(self, direction: int) -> float:
        """Seconds that a context axis adds to attention: exposed exchange and sums. 0: forward, 1: backward."""
        if self.run.cp == 1:
            return 0.0
        return self.ring_exposed_s[direction] + self._memory_s(self._ring.added_bytes()[direction])

    @property
    def ring_busy_s(self) -> Both:
        """Seconds of a layer's exchange of keys and values over the context axis, forward and backward."""
        return self._ring.busy_s()

    @property
    def ring_exposed_s(self) -> Both:
        """Seconds of this exchange that attention does not hide, forward and backward."""
        return self._ring.exposed_s(self._core_forward_s(), self._core_backward_s())

    @property
    def _ring(self) -> Ring:
        return Ring(self.run, self.cluster, self.software)

    def _context_s(self) -> float:
        """Seconds of reading once the keys and values of the earlier tokens that any query sees."""
        windows = self.run.shape.windows
        each = (self.before if window is None else min(self.before, window - 1) for window in windows)
        return self._tokens_s(fmean(each) if self.before else 0.0)

    def _tokens_s(self, tokens: float) -> float:
        """Seconds of reading the keys and values of so many tokens of each sequence."""
        run = self.run
        return self._memory_s(2 * run.micro_batch * tokens * run.shape.kv_width / run.tp * run.element_bytes)

    def _core_forward_s(self) -> float:
        """Plain kernels: two batched products over all scores, and softmax; flash: scores below the mask."""
        use, device = self.software.efficiency, self.cluster.device
        kernel = self.run.effective_attention
        if kernel in ("plain", "fused-softmax"):
            moved = 2 * self.run.element_bytes * self._scores()
            size = self.run.shape.head_size
            rate = use.batched_matmul * gcd(size * self.run.element_bytes, WIDEST_LOAD_BYTES) / WIDEST_LOAD_BYTES
            # As for flash kernels below, calibrated rates are for heads of size 128.
            rate *= (size / (size + WRITTEN_SCORE)) / (128 / (128 + WRITTEN_SCORE))
            products = 2 * device.matmul_s(self._attention_flops() / 2, moved / 2, self.run.precision, rate)
            return products + self._memory_s(self._scores() * self._score_bytes())
        # Both kernels were written for the A100.
        share = use.flash1 if kernel == "flash1" else use.flash2
        if not self.software.native_attention:
            share *= device.early_kernels
        rate = device.peak_flops_per_s[self.run.precision] * share
        if kernel == "flash2":
            size = self.run.shape.head_size
            # A soft cap's tanh is computed by an exponential, too.
            exponential = EXPONENTIAL * (2 if self.run.shape.attn_softcap else 1)
            # The calibrated rates are for heads of size 128.
            rate *= (size / (size + exponential)) / (128 / (128 + EXPONENTIAL))
        # Half of the FLOPs: flash kernels skip the blocks above the diagonal. Each head reads the mask.
        mask_s = self._memory_s(self.run.element_bytes * self._masked_scores())
        return self._attention_flops() / 2 / rate + mask_s + device.kernel_s * self.run.cp

    def _core_backward_s(self) -> float:
        """Plain: 4 products for 2 of the forward. Flash: 5 for 2, since scores are recomputed (arXiv 2307.08691)."""
        forward_s = self._core_forward_s()
        if self.run.effective_attention in ("plain", "fused-softmax"):
            memory_s = self._memory_s(self._scores() * self._score_bytes())
            return 2 * (forward_s - memory_s) + READS_MORE * memory_s
        return 2.5 * forward_s

    def _tensor_s(self) -> float:
        """One all-reduce of the residual stream, or with sequence parallelism an all-gather and a reduce-scatter."""
        run = self.run
        return sum(
            map(self._exchange_s, ("all_gather", "reduce_scatter") if run.sequence_parallel else ("all_reduce",))
        )

    def _exchange_s(self, kind: Collective) -> float:
        """One tensor-parallel collective of the residual stream."""
        run = self.run
        if run.tp == 1:
            return 0.0
        group = Group.strided(run.tp, 1, self.cluster.devices_per_node)
        message = run.tokens * run.shape.hidden * run.element_bytes
        return self.cluster.collective_s(kind, message, group, self.software.efficiency.tensor_bus)

    def _backward_tensor_s(self) -> float:
        """Seconds that the collectives of a layer's backward add to it.

        With overlap, the two column-parallel matrices (queries, keys and values; into the MLP) reduce the gradient of
        their input while they compute that of their weights; with sequence parallelism they also gather their input
        while they compute the gradient of it (arXiv 2205.05198, section 4.2.2). The products are slower meanwhile
        (``together_s``). The row-parallel ones gather first.
        """
        if self.run.tp == 1 or not self.software.overlaps_columns:
            return 2 * self._tensor_s()
        products = layer_products(self.run)
        added_s = 0.0
        for size in products[::2]:
            beside: list[tuple[float, Collective]] = [(self._weight_s(*size), "all_reduce")]
            if self.run.sequence_parallel:
                added_s += self._exchange_s("all_gather")
                beside = [(self._input_s(*size), "all_gather"), (self._weight_s(*size), "reduce_scatter")]
            added_s += sum(together_s(product_s, self._exchange_s(kind)) - product_s for product_s, kind in beside)
        return added_s

    def _num_collectives(self) -> int:
        """Number of collectives in ``_tensor_s``."""
        return 0 if self.run.tp == 1 else (2 if self.run.sequence_parallel else 1)

    def _num_kernels(self) -> float:
        """Number of kernels of one layer's forward: products, norms, rotation, attention, activation, residuals."""
        attention = {"plain": 8, "fused-softmax": 5, "flash1": 2, "flash2": 2}[self.run.effective_attention]
        family = self.run.shape.kind
        norms = family.layer_norms + (0 if family.qk_norm == "none" else 2)
        norms *= 1 if self.run.fused_norm else UNFUSED_NORM_KERNELS
        rotation = 8 if self.run.shape.kind.is_rotary else 2
        casts = 4 if self.run.products else 0
        return 4 + norms + rotation + attention * self.run.cp + 6 + casts + more_kernels(self.run)
