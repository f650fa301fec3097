"""Continues texts with a trained model, through the pipeline, with cached keys and values.

The prompts are the micro-batches of forward-only schedules. The first one runs the prompts, each further one a token of
every sequence. The rank of the last stage draws the next tokens and sends them to all.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipeloom.checkpoint.checkpoint_choice import choose_checkpoint
from pipeloom.config import RunConfig
from pipeloom.data.tokenizer import Tokenizer
from pipeloom.errors import UserError
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.stage import Continued
from pipeloom.model import KeyValueCache
from pipeloom.training.checkpoints.checkpoint import Checkpoints
from pipeloom.training.memory_check import check_memory
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.session import Tokens, check_processes, load_tokens, run_on_all_ranks

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoding returns it for the first bytes of a character."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from its logits.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token, the first of equal ones.
        top_k: draw among so many of the most probable tokens; ``None`` for all.
        top_p: draw among the fewest most probable tokens whose probabilities add up to this, a fraction (arXiv
            1904.09751); 1 for all.
        seed: of the draws; those of a prompt do not depend on the other prompts.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


class Request(NamedTuple):
    """What to continue.

    Attributes:
        prompts: texts, none of them empty.
        max_tokens: most new tokens of each.
        sampling: how tokens are drawn.
    """

    prompts: tuple[str, ...]
    max_tokens: int
    sampling: Sampling = Sampling()


class Text(NamedTuple):
    """A continued text.

    Attributes:
        prompt: as given.
        continuation: the text behind it.
        tokens: of the continuation.
        end: why it ends: the model ended the text, or it has the largest length.
    """

    prompt: str
    continuation: str
    tokens: tuple[int, ...]
    end: Literal["end of text", "length"]


class Generated(NamedTuple):
    """Continued texts, and how long they took.

    Attributes:
        texts: in the order of the prompts.
        prompt_tokens: of all prompts.
        prompt_s: seconds of the steps that ran prompts, with the first new token of each.
        token_s: seconds of all further steps.
        checkpoint: path of the weights.
        step: of the checkpoint.
    """

    texts: tuple[Text, ...]
    prompt_tokens: int
    prompt_s: float
    token_s: float
    checkpoint: str
    step: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sequences together, without the steps that ran prompts; 0 without others."""
        more = sum(len(text.tokens) - 1 for text in self.texts)
        return more / self.token_s if self.token_s else 0.0


def generate(config: RunConfig, run: Path, request: Request, *, streams: bool = False) -> Generated | None:
    """Continue prompts with the newest undamaged checkpoint of a run. Starts the processes of a run and waits for them.

    Args:
        config: without problems; ``layout.num_microbatches`` is the number of sequences in the pipeline at the same
            time.
        run: run folder, or a checkpoint.
        request: prompts, length, and how tokens are drawn.
        streams: whether rank 0 writes each text to standard output as it grows; one prompt only.

    Returns:
        The texts; under a launcher on rank 0, ``None`` elsewhere.

    Raises:
        UserError: there is no undamaged checkpoint, it is of another model, a prompt is too long, or the host lacks
            memory.
        WorkerError: a process failed.
    """
    check_processes(config)
    check_memory(config, trains=False)
    choice = choose_checkpoint(run)
    config = replace(config, checkpoint=replace(config.checkpoint, resume=choice.path))
    check_lengths(config, load_tokens(config).tokenizer, request)
    return run_on_all_ranks(config, partial(_generate, request, streams), load=load_tokens)


def longest(config: RunConfig) -> int:
    """Most tokens of a sequence, prompt and continuation together."""
    # Each tensor-parallel rank sends its share of the tokens between stages, so that steps have at least as many tokens
    # as there are ranks. Those behind the last one need positions.
    return config.data.seq_len - max(0, config.layout.tp - 2)


def check_lengths(config: RunConfig, tokenizer: Tokenizer, request: Request) -> None:
    """Refuse prompts that leave no room for the largest number of new tokens.

    Raises:
        UserError: lists all of them.
    """
    most, more, problems = longest(config), request.max_tokens, list[str]()
    for number, prompt in enumerate(request.prompts, 1):
        length = len(_encode(tokenizer, prompt))
        if length + more > most:
            problems.append(f"prompt {number} has {length} tokens, which with {more} more are {length + more}")
    if problems:
        raise UserError(
            "\n".join([f"sequences have at most {most} tokens (data.seq_len {config.data.seq_len}):", *problems])
            + "\nshorten the prompts, or use a smaller --max-tokens; a model with rotary positions takes a larger "
            "--data.seq-len"
        )


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    return [*tokenizer.begin_of_text, *tokenizer.encode(prompt.encode()).tolist()]


def _generate(request: Request, streams: bool, config: RunConfig, world: World, loaded: Tokens) -> Generated | None:
    path, tokenizer = config.checkpoint.resume, loaded.tokenizer
    assert path is not None
    pipeline = Pipeline(config, world, trains=False)
    info = Checkpoints(config, world, pipeline, None, path, tokenizer=tokenizer).restore(path)
    decoder = Decoder(pipeline, world, tokenizer, config, request)
    stream = _Stream(tokenizer, request.prompts[0]) if streams and world.rank == 0 else None
    sequences = [
        _Sequence.of(_encode(tokenizer, prompt), request.sampling.seed + number)
        for number, prompt in enumerate(request.prompts)
    ]
    size = config.layout.num_microbatches
    for first in range(0, len(sequences), size):
        decoder.run(sequences[first : first + size], stream)
    if stream is not None:
        stream.end()
    pipeline.close()
    if world.rank > 0:
        return None
    texts = tuple(
        Text(prompt, tokenizer.decode(one.drawn), tuple(one.drawn), "end of text" if one.has_ended else "length")
        for prompt, one in zip(request.prompts, sequences, strict=True)
    )
    num_prompt_tokens = sum(one.prompt_length for one in sequences)
    return Generated(texts, num_prompt_tokens, decoder.prompt_s, decoder.token_s, str(path), info.step)


@dataclass
class _Sequence:
    """A sequence that grows.

    Attributes:
        tokens: prompt and continuation.
        prompt_length: tokens of the prompt.
        draws: random numbers of the sequence.
        has_ended: whether the model has ended the text; that token is not part of it.
    """

    tokens: list[int]
    prompt_length: int
    draws: torch.Generator
    has_ended: bool = False

    @classmethod
    def of(cls, prompt: list[int], seed: int) -> "_Sequence":
        """The sequence of a prompt."""
        return cls(prompt, len(prompt), torch.Generator().manual_seed(seed))

    @property
    def drawn(self) -> list[int]:
        """The continuation."""
        return self.tokens[self.prompt_length :]


class Decoder:
    """Continues sequences through a pipeline. All methods are collective.

    Args:
        pipeline: of this rank, with weights.
        world: all ranks.
        tokenizer: of the model.
        config: resolved.
        request: length, and how tokens are drawn.

    Attributes:
        prompt_s, token_s: see ``Generated``.
    """

    def __init__(
        self, pipeline: Pipeline, world: World, tokenizer: Tokenizer, config: RunConfig, request: Request
    ) -> None:
        self._pipeline, self._world, self._tokenizer = pipeline, world, tokenizer
        self._sampling, self._max_tokens = request.sampling, request.max_tokens
        self._seq_len, self._multiple = config.data.seq_len, config.layout.tp
        self.prompt_s = self.token_s = 0.0

    def run(self, sequences: Sequence[_Sequence], stream: "_Stream | None" = None) -> None:
        """Continue sequences until each has ended or its largest length."""
        begin = time.perf_counter()
        # Room for what pads the last step, too.
        room = max(len(one.tokens) for one in sequences) + self._max_tokens + self._multiple
        caches = [KeyValueCache(min(room, self._seq_len)) for _ in sequences]
        growing = list(range(len(sequences)))
        known = [0] * len(sequences)
        for number in range(self._max_tokens):
            new = [sequences[index].tokens[known[index] :] for index in growing]
            earlier = [Continued(caches[index], known[index]) for index in growing]
            drawn = self._step(earlier, new, [sequences[index].draws for index in growing])
            for index, token in zip(growing, drawn, strict=True):
                known[index] = len(sequences[index].tokens)
                if token == self._tokenizer.end_of_text:
                    sequences[index].has_ended = True
                    continue
                sequences[index].tokens.append(token)
                if stream is not None:
                    stream.show(sequences[index].drawn)
            growing = [index for index in growing if not sequences[index].has_ended]
            now = time.perf_counter()
            if number == 0:
                self.prompt_s += now - begin
            else:
                self.token_s += now - begin
            begin = now
            if not growing:
                break

    def _step(
        self, earlier: Sequence[Continued], new: Sequence[list[int]], draws: Sequence[torch.Generator]
    ) -> list[int]:
        """The next token of each sequence, after new ones."""
        # One length for all, since messages have fixed shapes. Attention is causal: what pads the shorter ones changes
        # nothing, and later tokens overwrite its keys and values.
        length = ceil(max(map(len, new)) / self._multiple) * self._multiple
        padded = [
            torch.tensor([tokens + [0] * (length - len(tokens))], dtype=torch.int64, device=self._world.device)
            for tokens in new
        ]
        found = self._pipeline.continue_sequences(earlier, padded, [len(tokens) - 1 for tokens in new])
        drawn = [
            draw(found[number][: self._tokenizer.vocab_size], self._sampling, one) if found else 0
            for number, one in enumerate(draws)
        ]
        return self._world.broadcast_all(drawn, self._pipeline.last_rank)


def draw(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    """Draw a token.

    Args:
        logits: ``[vocab_size]``.
        sampling: how.
        draws: random numbers.
    """
    # On the CPU in float64, so that a seed draws the same tokens on every device.
    logits = logits.double().cpu()
    if sampling.temperature == 0:
        return int((logits == logits.max()).nonzero()[0])  # argmax may return any of equal ones
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    shares = torch.softmax(logits, dim=-1)
    if sampling.top_p < 1:
        ordered, places = shares.sort(descending=True, stable=True)
        # The token that crosses the limit stays.
        shares = shares.index_fill(0, places[ordered.cumsum(0) - ordered >= sampling.top_p], 0.0)
    return int(torch.multinomial(shares, 1, generator=draws))


class _Stream:
    """Writes a text to standard output while it grows, in whole characters."""

    def __init__(self, tokenizer: Tokenizer, prompt: str) -> None:
        self._tokenizer, self._prompt, self._shown = tokenizer, prompt, 0
        self._text = prompt

    def show(self, tokens: Sequence[int]) -> None:
        """Write what is new."""
        self._text = self._prompt + self._tokenizer.decode(tokens)
        self._write(self._text.rstrip(_UNFINISHED))

    def end(self) -> None:
        """Write the rest, and a line break."""
        self._write(self._text)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _write(self, text: str) -> None:
        sys.stdout.write(text[self._shown :])
        sys.stdout.flush()
        self._shown = max(self._shown, len(text))
