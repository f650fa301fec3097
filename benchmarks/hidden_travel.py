"""How much of the exchange of tokens halves of a micro-batch hide: measured over two processes, beside the cost model.

``python benchmarks/hidden_travel.py``: two gloo processes share the experts of a stage of four layers, and run forward
and backward of a micro-batch. Each exchange of rows takes at least a given time, one after the other, as on a link: it
ends only then. Predicted is the formula of ``pipeloom.cost.overlap`` with the measured seconds of the halves without
such a link. A whole micro-batch has half as many exchanges, each for twice that time. With ``--sleeps-ms`` attention
and experts sleep, for machines that have other work.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.config import ModelConfig
from pipeloom.cost.collectives import together_s
from pipeloom.execute.communication.expert_groups import TravelGroup
from pipeloom.execute.communication.torch_groups import GlooGroup
from pipeloom.model import Transformer, build_stage
from pipeloom.model.expert_parallel import ExpertParallel

_COLUMNS = "{:>9}{:>9}{:>9}{:>11}{:>7}{:>8}"
LAYERS, SEQUENCES, TOKENS = 4, 4, 256
MODEL = ModelConfig(
    num_layers=LAYERS, hidden_size=256, num_heads=8, ffn_size=512, experts=8, expert_ffn=512, balance="none"
)


class _Sleep(torch.autograd.Function):
    """Its input, after a while; its gradient after twice that."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, ctx.seconds = args
        time.sleep(ctx.seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return args[0], None


def slept(stage: Transformer, seconds: float) -> None:
    """Let the attention of a half, and the experts of a layer for it, take so long."""
    for layer in stage.layers.values():
        for block in (layer.attention, next(iter(layer.feed_forward.experts.values()))):
            block.register_forward_hook(
                lambda _, __, output: _Sleep.apply(output, seconds * (1 if stage.overlaps else 2))
            )


class Link(TravelGroup):
    """A group whose exchanges of rows take a while longer, one after the other.

    Attributes:
        seconds: that an exchange takes at least.
    """

    seconds = 0.0
    _free_s = 0.0

    def start(self, received: Tensor, sent: Tensor, *sizes: list[int]) -> Callable[[], None]:
        """As of ``TravelGroup``."""
        finish = super().start(received, sent, *sizes)
        if sent.ndim == 1:
            return finish
        self._free_s = until_s = max(time.perf_counter(), self._free_s) + self.seconds

        def wait() -> None:
            finish()
            time.sleep(max(0.0, until_s - time.perf_counter()))

        return wait


def measured(stage: torch.nn.Module, x: Tensor, repeats: int) -> tuple[float, float]:
    """Median seconds of forward and backward, the larger of both ranks."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin_s = time.perf_counter()
        output = stage(x.detach().requires_grad_())
        middle_s = time.perf_counter()
        output.sum().backward()
        both = torch.tensor([middle_s - begin_s, time.perf_counter() - middle_s], dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        times.append(both.tolist())
    forward_s, backward_s = zip(*times[1:], strict=True)
    return median(forward_s), median(backward_s)


def predicted(compute_s: float, in_experts: float, exchange_s: float) -> float:
    """Seconds of a stage whose halves take ``compute_s`` together, ``in_experts`` of it in experts."""
    ahead_s, inside_s = (share * compute_s / LAYERS / 2 for share in (1 - in_experts, in_experts))
    layer_s = 2 * together_s(ahead_s, exchange_s) + 2 * together_s(inside_s, exchange_s)
    return LAYERS * layer_s + ahead_s + exchange_s - together_s(ahead_s, exchange_s)


def run(rank: int, port: int, repeats: int, sleeps_s: float) -> None:
    """One of the two processes; the first prints."""
    sequences, tokens = (SEQUENCES, TOKENS) if sleeps_s == 0 else (2, 8)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = Link(GlooGroup(dist.new_group([0, 1]), [0, 1], rank))
    built = {"max_positions": TOKENS, "seed": 0, "dtype": torch.float32, "device": "cpu"}
    stage = build_stage(MODEL.resolve(256), range(1, LAYERS + 1), sharing=ExpertParallel(group), **built)
    x = torch.randn(sequences, tokens, 256, generator=torch.Generator().manual_seed(rank))
    if sleeps_s:
        slept(stage, sleeps_s)
    spent = {"experts": 0.0}
    for layer in stage.layers.values():
        for expert in layer.feed_forward.experts.values():
            expert.register_forward_pre_hook(lambda *_: spent.update(experts=spent["experts"] - time.perf_counter()))
            expert.register_forward_hook(lambda *_: spent.update(experts=spent["experts"] + time.perf_counter()))
    alone = measured(stage, x, repeats)
    in_experts = spent["experts"] / (repeats + 1) / alone[0]
    stage.overlaps = True
    halves = measured(stage, x, repeats)
    if rank == 0:
        print(_COLUMNS.format("exchange", "whole", "halves", "predicted", "ratio", "hidden"), "(ms; forward, backward)")
    for milliseconds in (0, 5, 10, 20, 40):
        group.seconds, stage.overlaps = 2 * milliseconds / 1e3, False
        whole = measured(stage, x, repeats)
        group.seconds, stage.overlaps = milliseconds / 1e3, True
        turns = measured(stage, x, repeats)
        for direction in (0, 1) if rank == 0 else ():
            guess_s = predicted(halves[direction], in_experts, group.seconds)
            travel_s = 4 * LAYERS * group.seconds
            exposed_s = turns[direction] - halves[direction]
            hidden = 1 - exposed_s / travel_s if travel_s else 0.0
            numbers = (milliseconds, whole[direction] * 1e3, turns[direction] * 1e3, guess_s * 1e3)
            texts = [f"{number:.1f}" for number in numbers]
            print(_COLUMNS.format(*texts, f"{guess_s / turns[direction]:.2f}", f"{hidden:.1%}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sleeps-ms", type=float, default=0.0, help="sleep in place of most compute")
    parser.add_argument("--port", type=int, default=29711)
    options = parser.parse_args()
    torch.multiprocessing.spawn(run, (options.port, options.repeats, options.sleeps_ms / 1e3), nprocs=2)
