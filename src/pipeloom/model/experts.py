"""A feed-forward block of several experts, of which a router gives each token some (arXiv 1701.06538, 2101.03961).

The router's scores are a softmax over the experts, in single precision at least. A token takes the experts with its
largest scores, and its output is the sum of theirs with these scores, divided by their sum, as in Mixtral and
Qwen3-MoE. Tokens are sorted by expert, so that each expert has a few products over a slice. Where
ranks share the experts, the sorted rows travel to them and back (``model.expert_parallel``).

No token is dropped, unless experts have a capacity. Then an expert takes, in training, the first tokens of a
micro-batch of one data rank, as many as the capacity, before they travel. The others go without it: the weights of
their other experts stay, and a token without experts has no output but that of the shared ones. The balance counts all.
By position, as GShard (arXiv 2006.16668, algorithm 1): whether a token is dropped depends on no token behind it.

Letters of shapes are those of ``model.transformer``; k is the number of experts that a token takes, R that of pairs of
a token and an expert, K that of those that are kept. With tensor parallelism each rank has a share of every expert's
inner width, and all tokens. The router reads the residual stream before the exchange, so a rank computes the scores of
its own tokens of it.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.model.expert_parallel import ALL_EXPERTS, ExpertParallel, Steps, finished
from pipeloom.model.feed_forward import GatedFeedForward, GeluFeedForward, feed_forward
from pipeloom.model.graph_breaks import graph_break
from pipeloom.model.parallel_layers import Split
from pipeloom.model.tensor_parallel import TensorParallel
from pipeloom.workload.model import Balance as BalanceKind
from pipeloom.workload.model import ModelConfig

_RATE = 0.001
"""Default step of a bias (arXiv 2408.15664, section 4.1)."""
_EXPERTS = ".feed_forward.experts."
"""Part of the names of the parameters of experts that a token takes or does not."""
BIAS = "balance_bias"
"""Name of the biases of a block with experts, which are no parameters, in checkpoints."""


class Balance:
    """What keeps the loads of a layer's experts equal.

    The loss is w x E x the sum over experts of load x mean score (arXiv 2101.03961, section 2.2). The load of an expert
    is its share of the pairs, a constant for the gradient; the mean score is over all tokens of a step. With equal
    loads the sum is 1 / E. Forwards count pairs, and backwards add the gradient of the loss to that of the scores.

    Where the loads are those of the whole batch, the counts of all forwards and replicas must be complete before the
    first backward. A forward that is repeated for its backward does not count again.

    Without a loss, each expert may have a bias that is added to its scores in the choice of experts, but not in their
    weights. After a step it moves by a fixed rate: up if the expert had fewer pairs than the mean, else down
    (arXiv 2408.15664, algorithm 1).

    Args:
        kind: as ``ModelConfig.balance``.
        num_experts: E.
        per_token: experts that a token takes.
        weight: w.
        rate: by which biases move.

    Attributes:
        kind: as given.
        bias: of the experts, [E] float32; ``None`` unless the kind is ``bias``, and on meta tensors.
        tally: for each expert the pairs of this step, and the number of dropped ones, [E + 1] int64; ``None`` before
            the first step.
        is_counting: whether forwards count.
        num_tokens: of a step of all replicas; ``None`` for those counted.
    """

    def __init__(
        self,
        kind: BalanceKind,
        num_experts: int,
        per_token: int,
        weight: float,
        rate: float,
    ) -> None:
        self.kind = kind
        self._num_experts, self._per_token, self._weight, self._rate = num_experts, per_token, weight, rate
        self.bias: Tensor | None = None
        self.tally: Tensor | None = None
        self.is_counting = False
        self.num_tokens: int | None = None

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss."""
        return self.kind in ("batch", "microbatch") and self._weight > 0

    @property
    def counts(self) -> Tensor | None:
        """For each expert the pairs of this step, [E] int64, dropped ones as well."""
        return None if self.tally is None else self.tally[:-1]

    @property
    def dropped(self) -> float:
        """Dropped pairs of this step / all."""
        return 0.0 if self.tally is None else float(self.tally[-1] / self.tally[:-1].sum().clamp(min=1))

    def begin(self, device: torch.device) -> None:
        """Count from zero."""
        self.tally = torch.zeros(self._num_experts + 1, dtype=torch.int64, device=device)

    def make_bias(self, device: torch.device | str) -> None:
        """Begin with zeros, if there are biases."""
        if self.kind == "bias":
            self.bias = torch.zeros(self._num_experts, device=device)

    def move(self) -> None:
        """Move the biases after a step, whose counts are those of all replicas."""
        if self.bias is not None and self.counts is not None:
            self.bias += self._rate * (self.counts.sum() - self._num_experts * self.counts).sign()

    def choose(self, scores: Tensor) -> Tensor:
        """For each token the indices of its experts, [..., k]."""
        plain = scores.detach()
        return (plain if self.bias is None else plain + self.bias).topk(self._per_token).indices

    def watch(self, scores: Tensor, loads: Tensor, most: int | None = None) -> Tensor:
        """Count the pairs of a forward.

        Args:
            scores: [..., E].
            loads: for each expert the pairs, [E] int64.
            most: of them that an expert takes; ``None`` for all.

        Returns:
            The scores; their backward adds the gradient of the loss.
        """
        if self.is_counting and self.tally is not None:
            self.tally[:-1] += loads
            if most is not None:
                self.tally[-1] += (loads - most).clamp(min=0).sum()
        return _Watched.apply(scores, self, loads) if self.has_loss and torch.is_grad_enabled() else scores

    def gradient(self, loads: Tensor) -> Tensor:
        """The gradient of the loss for the scores of one token, [E] float64; ``loads`` are those of its micro-batch."""
        counted = self.counts if self.kind == "batch" and self.counts is not None else loads
        pairs = counted.sum().double()
        num_tokens = pairs / self._per_token if self.num_tokens is None else self.num_tokens
        return counted * (self._weight * self._num_experts / (pairs * num_tokens))


class _Watched(torch.autograd.Function):
    """Returns the scores, and adds the gradient of their balance loss in the backward."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        # Counts are no activations: they are not moved, and are complete only when the backward reads them.
        ctx, scores, ctx.balance, ctx.loads = args
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        return args[0] + ctx.balance.gradient(ctx.loads).to(args[0].dtype), None, None


class Router(Split, nn.Module):
    """Scores of experts for tokens: a matrix, replicated over tensor-parallel ranks, and a softmax."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.splits = {}
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., E], in single precision at least."""
        return _WideLinear.apply(x, self.weight).softmax(-1)


class _WideLinear(torch.autograd.Function):
    """``x @ weight.T`` in single precision at least, which keeps both in their own types."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, weight = args
        # A frozen router needs its input for no gradient.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.dtype = x.dtype
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ weight.to(wide).t()

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        x, weight = ctx.saved_tensors
        own = (args[0] @ weight.to(args[0].dtype)).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return own, None
        rows, taken = args[0].flatten(0, -2), x.flatten(0, -2).to(args[0].dtype)
        return own, (rows.t() @ taken).to(weight.dtype)


class _Rows(torch.autograd.Function):
    """Some rows of a matrix of which each is there ``number`` times; the gradient is a sum in a fixed order."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, order, ctx.number = args
        ctx.save_for_backward(order)
        ctx.size = len(x) * ctx.number
        return x.index_select(0, order if ctx.number == 1 else order // ctx.number)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        (order,) = ctx.saved_tensors
        own = _put(args[0], order, ctx.size)
        # Not index_add, which on GPUs adds rows in any order.
        return own if ctx.number == 1 else own.view(-1, ctx.number, own.shape[-1]).sum(1), None, None


class _Back(torch.autograd.Function):
    """The inverse of ``_Rows`` with each row once: a matrix of ``size`` rows; those that were not taken are zero."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, rows, order, size = args
        ctx.save_for_backward(order)
        return _put(rows, order, size)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        (order,) = ctx.saved_tensors
        return args[0].index_select(0, order), None, None


def _put(rows: Tensor, order: Tensor, size: int) -> Tensor:
    """A matrix of ``size`` rows that has these at the places ``order``."""
    if len(order) < size:
        return rows.new_zeros(size, rows.shape[1]).index_copy_(0, order, rows)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(size, device=order.device))
    return rows.index_select(0, inverse)


class ExpertFeedForward(nn.Module):
    """Experts in place of a layer's feed-forward block, and perhaps one block that every token takes.

    Attributes:
        balance: of the loads.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        layout, within = config.expert_layout, parallel.shares_only
        assert layout is not None, "a model without experts"
        self._parallel = parallel
        self.router = Router(config.hidden_size, layout.count)
        self._layout, self._sharing = layout, ALL_EXPERTS
        # A dict with the numbers of experts as keys, so that names are the same on every rank.
        self.experts = nn.ModuleDict(
            {str(one): feed_forward(config, layout.ffn, within) for one in range(layout.count)}
        )
        shared = feed_forward(config, layout.shared * layout.ffn, within) if layout.shared else None
        assert not isinstance(shared, GeluFeedForward), "experts have gates"
        self.shared: GatedFeedForward | None = shared
        self.balance = Balance(
            config.known_balance,
            layout.count,
            layout.per_token,
            config.known_balance_weight,
            config.balance_rate or _RATE,
        )

    def share(self, sharing: ExpertParallel) -> None:
        """Keep this rank's experts only."""
        self._sharing = sharing
        self.experts = nn.ModuleDict({str(one): self.experts[str(one)] for one in sharing.own(self._layout.count)})

    @graph_break  # an expert has another number of tokens each time, for each of which it would be compiled again
    def forward(self, x: Tensor) -> Tensor:
        """Each token by itself; returns what is added to the residual stream."""
        return finished(self.steps(x))

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """As ``forward``, with pauses while tokens travel."""
        parallel, scores = self._parallel, self.router(x)
        chosen = self.balance.choose(scores)
        chosen_BTk = parallel.every_token(chosen)
        loads = chosen_BTk.flatten().bincount(minlength=self._layout.count) if not x.is_meta else None
        most = self._layout.most_tokens(chosen_BTk[..., 0].numel()) if self.training else None
        if loads is not None:
            scores = self.balance.watch(scores, loads, most)
        weights = scores.gather(-1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        x_BTH, weights_BTk = parallel.enter(x), parallel.enter(weights)
        order_K, sizes = self._kept(chosen_BTk, loads, most)
        rows_KH = _Rows.apply(x_BTH.flatten(0, 1), order_K, self._layout.per_token)
        outputs_KH, shared_BTH = yield from self._outputs(rows_KH, sizes, x_BTH)
        mixed_RH = _Back.apply(outputs_KH, order_K, weights_BTk.numel())
        mixed_BTkH = mixed_RH.view(*weights_BTk.shape, -1)
        y_BTH = (mixed_BTkH * weights_BTk.unsqueeze(-1)).sum(-2)
        return parallel.leave(y_BTH if shared_BTH is None else y_BTH + shared_BTH)

    def _kept(self, chosen_BTk: Tensor, loads: Tensor | None, most: int | None) -> tuple[Tensor, Sequence[int]]:
        """The pairs that experts take, sorted by expert and then by token, and for each expert their number."""
        sizes, order_R = self._sizes(loads, chosen_BTk.numel()), chosen_BTk.flatten().argsort(stable=True)
        if most is None or max(sizes) <= most:
            return order_R, sizes
        return torch.cat([own[:most] for own in order_R.split(list(sizes))]), [min(size, most) for size in sizes]

    def _sizes(self, loads: Tensor | None, num_pairs: int) -> Sequence[int]:
        """For each expert its number of pairs; equal ones on meta tensors, of which no choice is known."""
        if loads is not None:
            return loads.tolist()
        number = self._layout.count
        return [num_pairs * (one + 1) // number - num_pairs * one // number for one in range(number)]

    def _outputs(self, rows_KH: Tensor, sizes: Sequence[int], x_BTH: Tensor) -> Steps[tuple[Tensor, Tensor | None]]:
        """Of rows in the order of the experts the output of each one's, on whichever rank it is; that of shared ones.

        Rows travel while the shared ones are computed: there while those into them, back while the one out of them.
        """
        if self._sharing.size == 1:
            return self._computed(rows_KH, sizes), None if self.shared is None else self.shared(x_BTH)
        route = self._sharing.route(sizes, rows_KH)
        forth, back = route.forth(), route.back()
        token = forth.start(rows_KH)
        shared = None if self.shared is None else self.shared.inner(x_BTH)
        yield
        rows_SH = _Rows.apply(forth.end(token), route.order, 1)
        token = back.start(_Back.apply(self._computed(rows_SH, route.sizes), route.order, len(route.order)))
        shared = None if self.shared is None or shared is None else self.shared.down(shared)
        yield
        return back.end(token), shared

    def _computed(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        # An expert without tokens runs, too: its weights get a gradient, zeros.
        parts = zip(self.experts.values(), rows.split(list(sizes)), strict=True)
        return torch.cat([expert(own) for expert, own in parts])


def share_experts(module: nn.Module, sharing: ExpertParallel) -> None:
    """Keep of all of a module's blocks with experts this rank's experts only."""
    for one in module.modules():
        if isinstance(one, ExpertFeedForward):
            one.share(sharing)


def is_of_expert(name: str) -> bool:
    """Whether a parameter is of an expert that ranks may share."""
    return _EXPERTS in name


def balances_of(module: nn.Module) -> dict[str, Balance]:
    """The balances of a module's blocks with experts, by the names of the blocks."""
    return {name: one.balance for name, one in module.named_modules() if isinstance(one, ExpertFeedForward)}


@contextmanager
def without_history(module: nn.Module) -> Iterator[None]:
    """Context in which experts are chosen and balanced by a forward alone: no counts of a step, and no biases."""
    balances = list(balances_of(module).values())
    kept = [(one.tally, one.bias) for one in balances]
    for one in balances:
        one.tally = one.bias = None
    try:
        yield
    finally:
        for one, (tally, bias) in zip(balances, kept, strict=True):
            one.tally, one.bias = tally, bias


def biases_of(module: nn.Module) -> dict[str, Tensor]:
    """Biases of a module's experts by name, where they have some."""
    found = {f"{name}.{BIAS}": one.bias for name, one in balances_of(module).items()}
    return {name: bias for name, bias in found.items() if bias is not None}


def is_bias(name: str) -> bool:
    """Whether a name in a checkpoint is that of biases of experts."""
    return name.endswith(f".{BIAS}")
