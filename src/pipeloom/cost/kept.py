"""Bytes that stages of this program keep of a micro-batch for its backward: exact closed forms.

They count the tensors that autograd saves for the modules of ``pipeloom.model`` and that nothing else keeps alive, on
the tensor-parallel rank with the largest share. With element size e, e' = max(e, 4) (norms and the loss compute in
single precision at least), hidden size H, query width Q, key width G, inner width F, heads a, vocabulary V, s tokens in
a sequence, n in a micro-batch, t tensor-parallel ranks, m = n / t with sequence parallelism and n without:

    each of two blocks   the input of its matrices, e H n
    each norm            its input e H m; LayerNorm a mean and a deviation for each token, 2 e' m, on CPUs 2 e m;
                         RMSNorm the deviation, e' m
    attention            queries, keys, values and output e (2 Q + 2 G) n / t; a sum for each row of scores, 4 a n / t,
                         unless its core is recomputed; on CPUs, for a token slice that is not the first, a mask e s S,
                         where S is the number of tokens up to the slice's end, unless a window or a soft cap takes
                         effect, for which the kernel makes its masks again
    norms of queries     input and deviation as above, for (Q + G) n / t elements, and for (a + k) n / t heads, k of
    and keys             them key heads, or for 2 n norms of all heads; no output
    GELU, SwiGLU         input and output 2 e F n / t; gate, up and product 3 e F n / t
    experts              in place of the block's input and SwiGLU: the router's input e H m and scores e' E m; indices
                         and weights of the k experts of each token, ((8 + e') k + e') m and e k n; for each of the k n
                         pairs of a token and an expert a row out of it, e H, for each that is not dropped its place, 8,
                         and for each that the rank computes a row into it, e H, and 3 e F / t; where ranks share
                         experts also its place, 8; of shared ones their SwiGLU, and with sequence parallelism their
                         input e H n
    rotary positions     cosines and sines of a sequence, 2 e' s Q / a, once per stage, if no layer is fully recomputed;
                         twice, with that condition each, where layers with a window have their own
    embedding            indices of learned positions 8 s; with several tensor-parallel ranks 9 n: which tokens are in
                         the rank's part of the vocabulary
    head                 a norm as above, e H n; the loss e' V n / t, and e' if t is 1; with a soft cap e V n / t

With borders of documents positions differ between sequences: n s in place of s. On CPUs a mask e n s S, which all
layers and stages of a rank share, is counted separately, because it never moves.

A matrix that is frozen needs its input for no gradient: with adapters blocks keep their input only if one of its
matrices has one, GELU and SwiGLU keep e F n / t less without one behind them, the head's norm has no output, and of
experts and their router no input is kept. Each adapter of rank r keeps e r n. The first layer with adapters keeps
less: below its first adapter nothing needs a gradient.

A fully recomputed layer keeps its input, e H m. Between the halves of a split backward a stage keeps, for each matrix,
its input and the gradient of its output, and the gradients of all other parameters.
``tests/training/test_kept_bytes.py`` compares all of it with stages on meta tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.workload.adapter import Target
from pipeloom.workload.layout import Recompute
from pipeloom.workload.model_shape import Experts
from pipeloom.workload.run import Run

_INDEX_BYTES = 8
"""Bytes of an index, such as a token's: PyTorch uses int64."""


@dataclass(frozen=True)
class Kept:
    """What one device keeps of a run's micro-batches, piece by piece.

    Attributes:
        run: the run. Attention counts as one fused kernel, whatever ``run.attention`` is; a fused norm implies a GPU.
    """

    run: Run

    @property
    def _wide(self) -> int:
        return max(self.run.element_bytes, 4)

    @property
    def _residual_tokens(self) -> int:
        """Tokens of the residual stream on a device."""
        return self.run.tokens // (self.run.tp if self.run.sequence_parallel else 1)

    @property
    def _num_positions(self) -> int:
        return self.run.tokens if self.run.by_document else self.run.rank_seq

    def _share(self, whole: int) -> int:
        """The largest share of ``whole`` rows on a tensor-parallel rank."""
        return -(-whole // self.run.tp)

    def _norm(self) -> int:
        """What a norm of the residual stream keeps itself."""
        shape, size, tokens = self.run.shape, self.run.element_bytes, self._residual_tokens
        if shape.kind.norms_have_biases:
            # PyTorch's CPU kernel stores mean and deviation in the type of its input.
            deviation = self._wide if self.run.fused_norm else size
            return (size * shape.hidden + 2 * deviation) * tokens
        return (size * shape.hidden + self._wide) * tokens

    def _block_input(self) -> int:
        """The input of matrices that read the residual stream."""
        return self.run.element_bytes * self.run.shape.hidden * self.run.tokens

    def _head_norms(self, *, of_queries: bool = True, of_keys: bool = True) -> int:
        """Bytes per token of the norms of queries and keys; their outputs are not kept."""
        shape = self.run.shape
        if shape.kind.qk_norm == "none":
            return 0
        is_width = shape.kind.qk_norm == "width"
        # Over several ranks the norm of all heads is several kernels, with an exchange between them.
        is_fused = not (is_width and self.run.tp > 1)
        separate = self._wide * (
            2 if self.run.adapter is None else 1
        )  # the gradient of the weight needs the normed input
        each, sides = self.run.element_bytes if is_fused else separate, 0
        for width, heads, is_kept in (
            (shape.query_width, shape.heads, of_queries),
            (shape.kv_width, shape.kv_heads, of_keys),
        ):
            deviations = 1 if is_width else self._share(heads)
            sides += (each * self._share(width) + self._wide * deviations) * is_kept
        return sides

    def layer(self, kind: Recompute, *, begins: bool = False) -> int:
        """Bytes of one layer that recomputes ``kind``; ``begins``: nothing below it needs a gradient."""
        shape, size, reads = self.run.shape, self.run.element_bytes, self._reads
        if kind == "full":
            return size * shape.hidden * self._residual_tokens
        # Up to the first adapter nothing needs a gradient; a layer that is trained whole keeps everything.
        flows = not begins or self.run.adapter is None
        has_core = flows or reads("q", "k", "v")
        has_attention = has_core or reads("o")
        queries, keys, inner = map(self._share, (shape.query_width, shape.kv_width, shape.ffn))
        is_output_kept = reads("o") or (has_core and kind != "selective")
        split = queries * (has_core + is_output_kept) + 2 * keys * has_core
        split += int(self._inner_kept(flows=has_attention) * inner) if shape.experts is None else 0
        split += 0 if self.run.adapter is None else len(self.run.adapter.targets) * self.run.adapter.rank
        scores = 4 * self._share(shape.heads) if has_core and kind != "selective" else 0
        heads = self._head_norms(of_queries=flows or reads("q"), of_keys=flows or reads("k"))
        followed = has_attention + (has_attention or reads("gate", "up", "down"))
        norms = shape.kind.norms_precede * (flows + has_attention) + shape.kind.norms_follow * followed
        of_block = reads("gate", "up") * self._block_input() if shape.experts is None else self._experts(shape.experts)
        inputs = reads("q", "k", "v") * self._block_input() + of_block
        return inputs + norms * self._norm() + (size * split + scores + heads) * self.run.tokens

    def _experts(self, experts: Experts) -> int:
        """Bytes of a block with experts, its input included."""
        run, size, wide, hidden = self.run, self.run.element_bytes, self._wide, self.run.shape.hidden
        taken, is_trained = experts.per_token, run.adapter is None
        inner = self._inner_kept(flows=True)
        own = size * hidden * is_trained + wide * experts.count + (_INDEX_BYTES + wide) * taken + wide
        pairs = (size * hidden + size) * run.pairs + _INDEX_BYTES * run.sent_pairs
        each = size * hidden * is_trained + size * int(inner * self._share(experts.ffn)) + _INDEX_BYTES * (run.ep > 1)
        pairs += each * run.computed_pairs
        shared = size * int(inner * self._share(experts.shared * experts.ffn))
        if is_trained and experts.shared and run.sequence_parallel and run.tp > 1:
            shared += size * hidden
        return own * self._residual_tokens + round(pairs) + shared * run.tokens

    def _inner_kept(self, *, flows: bool) -> float:
        """Numbers that the feed-forward block keeps for each inner element; ``flows``: its input needs a gradient."""
        family, reads = self.run.shape.kind, self._reads
        if flows:
            return family.inner_kept - (not reads("down"))
        # The gradient of up takes the gate, that of the gate both.
        gated = max(2 * reads("gate"), reads("up")) if family.gates > 1 else reads("up")
        return gated + reads("down")

    def has_core(self) -> bool:
        """Whether the first layer that trains has a backward of the core of its attention."""
        return self._reads("q", "k", "v")

    def turns(self) -> bool:
        """Whether the backward of the first layer that trains reads rotary angles."""
        return self._reads("q", "k")

    def _reads(self, *targets: Target) -> bool:
        """Whether the gradient of a weight needs the input of one of these matrices."""
        return self.run.adapter is None or self.run.adapter.reads(*targets)

    def positions(self, kinds: Sequence[Run]) -> int:
        """Bytes of the rotary angles of a stage with layers of these kinds (``Run.alike``).

        A fully recomputed layer refers to them, so that they do not count as saved by autograd alone.
        """
        shape, tables = self.run.shape, dict[bool, set[Recompute]]()
        for one in kinds:
            is_local = shape.kind.rope_local_theta is not None and one.shape.window is not None
            tables.setdefault(is_local, set()).add(one.recompute)
        kept = [recompute for recompute in tables.values() if "full" not in recompute]
        return len(kept) * 2 * self._wide * self._num_positions * shape.head_size if shape.kind.is_rotary else 0

    def embedding(self) -> int:
        """Bytes of the embedding; its input, the tokens, belongs to the batch."""
        own = (_INDEX_BYTES + 1) * self.run.tokens if self.run.tp > 1 else 0
        return own + (0 if self.run.shape.kind.is_rotary else _INDEX_BYTES * self._num_positions)

    def head_norm(self) -> int:
        """Bytes of the norm before the head."""
        return self._norm() + (self._block_input() if self.run.adapter is None else 0)

    def num_logits(self) -> int:
        """Logits of a micro-batch."""
        return self._share(self.run.shape.vocab) * self.run.tokens

    def loss(self) -> int:
        """Bytes of the loss: a probability for each logit, and without tensor parallelism a number of tokens.

        A soft cap keeps its tanh.
        """
        capped = self.run.element_bytes * self.num_logits() if self.run.shape.logit_softcap else 0
        return capped + self._wide * (self.num_logits() + (1 if self.run.tp == 1 else 0))

    def masks(self, begin: int) -> int:
        """Bytes of the attention mask of a layer, for a token slice that begins at ``begin``; 0 on GPUs."""
        # If queries do not begin at token 0, PyTorch's CPU kernel takes a mask tensor, which each layer keeps. A single
        # query needs none.
        run = self.run
        has_mask = begin > 0 and run.seq > 1 and not (run.fused_norm or run.by_document)
        return run.element_bytes * run.seq * (begin + run.seq) if has_mask and self._is_fused(begin) else 0

    def _is_fused(self, begin: int) -> bool:
        return self.run.shape.has_fused_attention(self.run.shape.window, begin + self.run.seq)

    def shared_mask(self, begin: int = 0) -> int:
        """Bytes of the mask of documents of a sequence, or of a token slice that begins at ``begin``; 0 on GPUs."""
        run = self.run
        # The blocks of a context axis make their own.
        has_mask = run.by_document and not run.fused_norm and self._is_fused(begin) and run.cp == 1
        return run.element_bytes * run.tokens * (begin + run.seq) if has_mask else 0

    def stage_input(self) -> int:
        """Bytes of a stage's input: a tensor-parallel rank's share of the tokens."""
        return self.run.element_bytes * self.run.shape.hidden * (self.run.tokens // self.run.tp)

    def key_values(self) -> int:
        """Bytes of one layer's keys and values, which later token slices need."""
        return 2 * self.run.element_bytes * self._share(self.run.shape.kv_width) * self.run.tokens

    def pending_layer(self) -> int:
        """Bytes of one layer between the halves of a split backward."""
        shape, size = self.run.shape, self.run.element_bytes
        queries, keys, inner = map(self._share, (shape.query_width, shape.kv_width, shape.ffn))
        family, experts = shape.kind, shape.experts
        router = 0
        block = 2 * shape.hidden + (1 + family.gates) * inner
        if experts is not None:
            # Of each pair, and of the shared experts if there are any.
            pairs = self.run.computed_pairs / self.run.tokens
            block = pairs * (2 * shape.hidden + (1 + family.gates) * self._share(experts.ffn))
            shared = experts.shared * experts.ffn
            block += 2 * shape.hidden + (1 + family.gates) * self._share(shared) if shared else 0
            router = experts.count * shape.hidden
        split = 2 * queries + 2 * keys + block
        return round(size * ((2 * shape.hidden + split) * self.run.tokens + router)) + self.pending_vectors()

    def pending_vectors(self) -> int:
        """Bytes of them that are gradients of a layer's vectors, which layers with shared weights have once."""
        shape, family = self.run.shape, self.run.shape.kind
        queries, keys, inner = map(self._share, (shape.query_width, shape.kv_width, shape.ffn))
        vectors = family.layer_norms * family.norm_vectors * shape.hidden
        vectors += (queries + 2 * keys) * family.qkv_biases + family.gates * inner * family.mlp_biases
        vectors += shape.hidden * (family.output_bias + family.mlp_biases) + shape.qk_norm_parameters
        vectors += (queries + keys) * (family.qk_norm == "width")
        return self.run.element_bytes * vectors

    def pending_embedding(self) -> int:
        """Bytes of the embedding between the halves: the gradient of its output."""
        shape, size = self.run.shape, self.run.element_bytes
        own = self._num_positions // (self.run.tp if self.run.sequence_parallel else 1)
        # A position for each token, and no exchange between both: their vectors have one and the same gradient.
        own *= not (self.run.by_document and self.run.tp == 1)
        return size * shape.hidden * (self.run.tokens + (0 if shape.kind.is_rotary else own))

    def pending_head(self) -> int:
        """Bytes of the head between the halves, without the gradient of the logits."""
        shape, size = self.run.shape, self.run.element_bytes
        vectors = shape.kind.norm_vectors * shape.hidden
        return size * (shape.hidden * self.run.tokens + vectors)
