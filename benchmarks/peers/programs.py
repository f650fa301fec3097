"""The other programs, as a user writes them. One process runs ``python -m peers.programs``, with torchrun's variables.

All begin with the same weights, read the same batches, clip by the norm of the whole gradient, and use fused AdamW.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from peers.plain import PlainLlama, plain_names
from pipeloom.catalog.weight_files import LLAMA_WEIGHTS

Start = dict[str, Any]
"""As ``peers.start.write_start`` describes."""


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Loop:
    """A loop over micro-batches in one process; the base of the others.

    Args:
        start: what all programs share.
        options: of the command.
    """

    def __init__(self, start: Start, options: argparse.Namespace) -> None:  # noqa: ARG002  others read them
        self.start, self.parts = start, 1
        self.model = self.build()

    def build(self) -> nn.Module:
        """The model with its initial weights."""
        return plain(self.start)

    def own(self, batch: Tensor) -> Tensor:
        """The rows of a batch that this process reads."""
        return batch

    def logits(self, tokens: Tensor) -> Tensor:
        """Of a micro-batch."""
        return self.model(tokens)

    def before(self, *, is_last: bool) -> None:
        """Before each micro-batch."""

    def backward(self, batch: Tensor) -> float:
        """Gradients of this process; returns its loss."""
        micro_batches = self.own(batch).split(self.start["microbatch_size"])
        total = torch.zeros(())
        for number, rows in enumerate(micro_batches, 1):
            self.before(is_last=number == len(micro_batches))
            loss = loss_of(self.logits(rows[:, :-1]), rows[:, 1:]) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        return float(total)

    def finish(self, loss: float) -> float:
        """Clip; returns the loss of the whole batch."""
        clip_grad_norm_(self.model.parameters(), self.start["clip"])
        return loss


class Transformers(Loop):
    """Llama of transformers."""

    def build(self) -> nn.Module:
        """The same weights by their names there."""
        from transformers import LlamaConfig, LlamaForCausalLM

        model = self.start["model"]
        config = LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_heads,
            rms_norm_eps=model.known_norm_eps,
            rope_theta=model.known_rope_theta,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
        found = LlamaForCausalLM(config)
        names = plain_names(model)
        weights = {names[own]: weight for own, weight in self.start["weights"].items()}
        tensors = LLAMA_WEIGHTS.of_model(list(weights), model.num_layers)
        found.load_state_dict({tensor.name: weights[tensor.parameters[0]] for tensor in tensors})
        return found.train()

    def logits(self, tokens: Tensor) -> Tensor:
        """Of its output."""
        return self.model(tokens).logits


class Ddp(Loop):
    """Replicas that exchange gradients with the last micro-batch."""

    def __init__(self, start: Start, options: argparse.Namespace) -> None:
        super().__init__(start, options)
        self.model = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def own(self, batch: Tensor) -> Tensor:
        """An equal part."""
        return batch.chunk(dist.get_world_size())[dist.get_rank()]

    def before(self, *, is_last: bool) -> None:
        """As ``no_sync``."""
        self.model.require_backward_grad_sync = is_last

    def finish(self, loss: float) -> float:
        """Gradients are equal on all ranks, so only the loss is exchanged."""
        clip_grad_norm_(self.model.parameters(), self.start["clip"])
        total = torch.tensor(loss)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


class Fsdp(Ddp):
    """FSDP2: a unit for each layer."""

    def __init__(self, start: Start, options: argparse.Namespace) -> None:
        Loop.__init__(self, start, options)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def before(self, *, is_last: bool) -> None:
        """Reduce gradients with the last micro-batch."""
        self.model.set_requires_gradient_sync(is_last)
        self.model.set_is_last_backward(is_last)


class PlainStage(nn.Module):
    """A stage of a plain llama, tokens or a residual stream to a residual stream or logits."""

    def __init__(self, model: PlainLlama, index: int, num_stages: int) -> None:
        super().__init__()
        layers, is_last = len(model.layers), index == num_stages - 1
        self.embedding = model.embedding if index == 0 else None
        self.layers = model.layers[layers * index // num_stages : layers * (index + 1) // num_stages]
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)
        self.register_buffer("cos", model.cos)
        self.register_buffer("sin", model.sin)

    def forward(self, x: Tensor) -> Tensor:
        """Its layers."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


class Pipelining(Loop):
    """``torch.distributed.pipelining``; with replicas each stage is a unit of FSDP2."""

    def __init__(self, start: Start, options: argparse.Namespace) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining import PipelineStage, schedules

        self.start = start
        replicas = dist.get_world_size() // options.pp
        mesh = init_device_mesh("cpu", (options.pp, replicas), mesh_dim_names=("pp", "dp"))
        self.replica, self.replicas = mesh.get_local_rank("dp"), replicas
        rank, count = mesh.get_local_rank("pp"), options.pp * options.loops
        whole = plain(start)
        is_v = options.schedule == "ZBVZeroBubble"
        self.indices = (rank, count - 1 - rank) if is_v else range(rank, count, options.pp)
        stages = {index: PlainStage(whole, index, count) for index in self.indices}
        self.model = nn.ModuleList(stages.values())
        del whole
        if replicas > 1:
            for stage in stages.values():
                fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)
        device, group = torch.device("cpu"), mesh.get_group("pp")
        made = [PipelineStage(stage, index, count, device, group=group) for index, stage in stages.items()]
        num_microbatches = start["batches"].shape[1] // start["microbatch_size"] // replicas
        kind = schedules.get_schedule_class(options.schedule)
        self.schedule = kind(made[0] if options.loops == 1 else made, num_microbatches, loss_fn=loss_of)
        self.is_first, self.is_last = 0 in stages, count - 1 in stages

    def backward(self, batch: Tensor) -> float:
        """One step of the schedule."""
        rows = batch.chunk(self.replicas)[self.replica]
        losses: list[Tensor] = []
        inputs = (rows[:, :-1].contiguous(),) if self.is_first else ()
        target = {"target": rows[:, 1:].contiguous(), "losses": losses} if self.is_last else {}
        self.schedule.step(*inputs, **target, return_outputs=False)
        return float(torch.stack(losses).detach().mean()) / self.replicas if losses else 0.0

    def finish(self, loss: float) -> float:
        """The norm of the whole gradient takes an exchange, which takes the loss with it."""
        gradients = [whole_or_local(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        totals = torch.stack([norm.double() ** 2, torch.tensor(loss, dtype=torch.float64)])
        dist.all_reduce(totals)
        total = totals[0].sqrt().float()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.start["clip"], total)
        return float(totals[1])


def whole_or_local(gradient: Tensor) -> Tensor:
    """The shard of a gradient that FSDP2 sharded."""
    local = getattr(gradient, "to_local", None)
    return gradient if local is None else local()


def plain(start: Start) -> PlainLlama:
    """A plain llama with the initial weights."""
    model = PlainLlama(start["model"], start["batches"].shape[2] - 1)
    model.load_state_dict(start["weights"], strict=False)
    return model


PROGRAMS: dict[str, Callable[[Start, argparse.Namespace], Loop]] = {
    "plain": Loop,
    "transformers": Transformers,
    "ddp": Ddp,
    "fsdp": Fsdp,
    "pipelining": Pipelining,
}


def adamw(parameters: Iterable[nn.Parameter], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Fused AdamW; vectors do not decay."""
    every, others = list(parameters), dict(settings)
    decay = others.pop("weight_decay", 0.0)
    groups = [
        {"params": [one for one in every if one.ndim > 1], "weight_decay": decay},
        {"params": [one for one in every if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], **(others | {"fused": True}))


def train(program: Loop, start: Start, lines: Path | None) -> Sequence[float]:
    """Train; returns the losses. Rank 0 writes a line for each step."""
    optimizer = adamw(program.model.parameters(), start["adamw"])
    losses: list[float] = []
    file = None if lines is None else lines.open("a", encoding="utf-8")
    for batch, rate in zip(start["batches"], start["rates"], strict=True):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        losses.append(program.finish(program.backward(batch)))
        optimizer.step()
        if file is not None:
            print(json.dumps({"loss": losses[-1], "step_time_s": time.perf_counter() - begin}), file=file, flush=True)
    return losses


def main() -> None:
    """Train as one of the processes of a program."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("kind", choices=PROGRAMS)
    options.add_argument("start", type=Path)
    options.add_argument("lines", type=Path)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--pp", type=int, default=1)
    options.add_argument("--loops", type=int, default=1)
    options.add_argument("--schedule", default="1F1B")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    start = torch.load(chosen.start, weights_only=False)
    size = int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    program = PROGRAMS[chosen.kind](start, chosen)
    train(program, start, chosen.lines if os.environ["RANK"] == "0" else None)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
