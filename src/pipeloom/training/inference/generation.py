"""Continues texts with a trained model, through the pipeline, with cached keys and values.

The sequences are the rows of micro-batches of forward-only schedules. The first schedule runs the prompts, each further
one a token of every sequence. The rank of the last stage draws the next tokens and sends them to all.

Where stages are swapped through one device, a schedule has many tokens, so that the first stages come while the last
ones compute the token before: a ring.

Letters of shapes are those of ``model.transformer``.
"""

# ruff: noqa: N806 (upper-case letters in names are shapes)

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipeloom.config import RunConfig
from pipeloom.config.layout_problems import NO_CACHE
from pipeloom.data.tokenizer import Tokenizer
from pipeloom.errors import RunError, UserError
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.stage import Continued
from pipeloom.model import KeyValueCache
from pipeloom.model.visible_keys import Documents
from pipeloom.terminal.words import count
from pipeloom.training.inference.ends import end_tokens
from pipeloom.training.inference.trained import NOT_FINITE, check_trained, load_trained, reads_start, with_trained
from pipeloom.training.memory_check import check_memory
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.session import Tokens, check_processes, load_tokens, resolve, run_on_all_ranks

_RING_TOKENS = 16
"""Tokens of a schedule in which stages are swapped. The first load is exposed once in each, and a text that
ends within one computes the rest of it in vain."""
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
        num_together: most texts in the pipeline at the same time.
    """

    prompts: tuple[str, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    num_together: int = 32


class Vocabulary(NamedTuple):
    """The tokens that may be drawn.

    Attributes:
        size: those below it.
        ends: those that end a text.
    """

    size: int
    ends: frozenset[int]


class Task(NamedTuple):
    """What all ranks do: a request, the tokens of each of its prompts, and those that may follow."""

    request: Request
    prompts: list[list[int]]
    vocabulary: Vocabulary


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
        step: of the checkpoint; ``None`` for a Hugging Face folder.
        peak_stage_bytes: most bytes of swapped stages on the device; 0 where no stage is swapped.
    """

    texts: tuple[Text, ...]
    prompt_tokens: int
    prompt_s: float
    token_s: float
    checkpoint: str
    step: int | None
    peak_stage_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sequences together, without the steps that ran prompts; 0 without others."""
        more = sum(len(text.tokens) - 1 for text in self.texts)
        return more / self.token_s if self.token_s else 0.0


def generate(config: RunConfig, run: Path, request: Request, *, streams: bool = False) -> Generated | None:
    """Continue prompts with a trained model. Starts the processes of a run and waits for them.

    Args:
        config: without problems, of one replica.
        run: run folder for its newest undamaged checkpoint, a checkpoint, or a Hugging Face folder.
        request: prompts, length, and how tokens are drawn.
        streams: whether rank 0 writes each text to standard output as it grows; one prompt only.

    Returns:
        The texts; under a launcher on rank 0, ``None`` elsewhere.

    Raises:
        UserError: there is no undamaged checkpoint, it is of another model, a prompt is too long, or the host lacks
            memory.
        RunError: the logits are not finite; or a process failed.
    """
    if config.model.adapted is not None:
        raise UserError(NO_CACHE)
    check_processes(config)
    check_memory(config, trains=False)
    config = with_trained(config, run)
    with reads_start(config):
        loaded = load_tokens(config)
        prompts = encoded(config, loaded.tokenizer, request)
        check_trained(resolve(config, loaded))
        assert config.checkpoint.start is not None
        ends = end_tokens(config.checkpoint.start, loaded.tokenizer)
        task = Task(request, prompts, Vocabulary(loaded.tokenizer.vocab_size, ends))
        return run_on_all_ranks(config, partial(_generate, task, streams=streams), load=load_tokens)


def longest(config: RunConfig) -> int:
    """Most tokens of a sequence, prompt and continuation together."""
    # Each tensor-parallel rank sends its share of the tokens between stages, so that steps have at least as many tokens
    # as there are ranks. Those behind the last one need positions.
    return config.data.seq_len - max(0, config.layout.tp - 2)


def encoded(config: RunConfig, tokenizer: Tokenizer, request: Request) -> list[list[int]]:
    """The tokens of each prompt.

    Raises:
        UserError: lists all prompts that leave no room for the largest number of new tokens.
    """
    most, more, problems = longest(config), request.max_tokens, list[str]()
    found = [[*tokenizer.begin_of_text, *tokenizer.encode(one.encode()).tolist()] for one in request.prompts]
    for number, length in enumerate(map(len, found), 1):
        if length + more > most:
            problems.append(f"prompt {number} has {count(length, 'token')}, which with {more} more are {length + more}")
    if problems:
        raise UserError(
            "\n".join([f"sequences have at most {most} tokens (data.seq_len {config.data.seq_len}):", *problems])
            + "\nshorten the prompts, or use a smaller --max-tokens; a model with rotary positions takes a larger "
            "--data.seq-len"
        )
    return found


def _generate(task: Task, config: RunConfig, world: World, loaded: Tokens, *, streams: bool) -> Generated | None:
    (request, prompts, vocabulary), tokenizer = task, loaded.tokenizer
    pipeline = Pipeline(config, world, trains=False)
    weights = load_trained(config, world, pipeline, tokenizer)
    decoder = Decoder(pipeline, world, vocabulary, config, request)
    stream = _Stream(tokenizer, request.prompts[0]) if streams and world.rank == 0 else None
    sequences = [_Sequence.of(tokens, request.sampling.seed + number) for number, tokens in enumerate(prompts)]
    size = request.num_together
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
    num_prompt_tokens = sum(len(one.prompt) for one in sequences)
    return Generated(
        texts,
        num_prompt_tokens,
        decoder.prompt_s,
        decoder.token_s,
        str(weights.path),
        weights.step,
        decoder.peak_stage_bytes,
    )


@dataclass
class _Sequence:
    """A sequence that grows.

    Attributes:
        prompt: its tokens.
        draws: random numbers of the sequence.
        drawn: tokens of the continuation.
        has_ended: whether the model has ended the text; that token is not part of it.
    """

    prompt: list[int]
    draws: torch.Generator
    drawn: list[int] = field(default_factory=list)
    has_ended: bool = False

    @classmethod
    def of(cls, prompt: list[int], seed: int) -> "_Sequence":
        """The sequence of a prompt."""
        return cls(prompt, torch.Generator().manual_seed(seed))


class _Rows(NamedTuple):
    """Sequences that are the rows of a micro-batch.

    Shorter prompts are padded on the left: the padding is a document of its own, which no token of the prompt sees, and
    positions begin behind it.

    Attributes:
        sequences: at most as many as there are rows.
        cache: their keys and values.
        padding: tokens before each row's prompt, [B, 1]; ``None`` if no row of any micro-batch has some.
    """

    sequences: list[_Sequence]
    cache: KeyValueCache
    padding: Tensor | None

    @property
    def has_ended(self) -> bool:
        """Whether all sequences have."""
        return all(one.has_ended for one in self.sequences)

    def newest(self) -> list[list[int]]:
        """The last token of each sequence."""
        return [one.drawn[-1:] or [0] for one in self.sequences]

    def continued(self, begin: int, num_tokens: int) -> Continued:
        """Their cached part, for new tokens from a position on."""
        if self.padding is None:
            return Continued(self.cache, begin)
        places_T = torch.arange(begin, begin + num_tokens, device=self.padding.device)
        firsts_BT = torch.where(places_T < self.padding, 0, self.padding)
        return Continued(self.cache, begin, Documents(firsts_BT))


class Decoder:
    """Continues sequences through a pipeline. All methods are collective.

    Args:
        pipeline: of this rank, with weights.
        world: all ranks.
        vocabulary: of the model's texts.
        config: resolved.
        request: length, and how tokens are drawn.

    Attributes:
        prompt_s, token_s, peak_stage_bytes: see ``Generated``.
    """

    def __init__(
        self, pipeline: Pipeline, world: World, vocabulary: Vocabulary, config: RunConfig, request: Request
    ) -> None:
        self._pipeline, self._world, self._vocabulary = pipeline, world, vocabulary
        self._sampling, self._max_tokens = request.sampling, request.max_tokens
        self._pp, self._tp, self._seq_len = config.layout.pp, config.layout.tp, config.data.seq_len
        self.prompt_s = self.token_s = 0.0
        self.peak_stage_bytes = 0

    def run(self, sequences: Sequence[_Sequence], stream: "_Stream | None" = None) -> None:
        """Continue sequences until each has ended or its largest length."""
        begin_s = time.perf_counter()
        length = max(len(one.prompt) for one in sequences)
        rows = self._rows(sequences, length)
        num_rows = len(rows[0].sequences)
        tokens = [[[0] * (length - len(one.prompt)) + one.prompt for one in each.sequences] for each in rows]
        end = 0
        number = 0
        while rows and number < self._max_tokens:
            begin, end = end, length + number
            if number > 0 and self._pipeline.store is not None:
                count = min(_RING_TOKENS, self._max_tokens - number)
                self._ring(rows[0], begin, count, stream)
                end += count - 1
            else:
                count = 1
                self._step(rows, [each + [each[0]] * (num_rows - len(each)) for each in tokens], begin, end)
                if stream is not None:
                    stream.show(sequences[0].drawn)
            rows = [each for each in rows if not each.has_ended]
            tokens = [each.newest() for each in rows]
            now_s = time.perf_counter()
            if number == 0:
                self.prompt_s += now_s - begin_s
            else:
                self.token_s += now_s - begin_s
            begin_s, number = now_s, number + count
            if self._pipeline.store is not None:
                self.peak_stage_bytes = max(self.peak_stage_bytes, self._pipeline.store.peak_bytes)

    def _rows(self, sequences: Sequence[_Sequence], length: int) -> list[_Rows]:
        """The micro-batches: as many as pipeline ranks, so that each rank has one, with as many rows as that takes."""
        size = ceil(len(sequences) / min(self._pp, len(sequences)))
        # Room for what pads the last step, too.
        room = min(length + self._max_tokens + self._tp, self._seq_len)
        is_padded = any(len(one.prompt) < length for one in sequences)
        found: list[_Rows] = []
        for first in range(0, len(sequences), size):
            own = list(sequences[first : first + size])
            padding = [length - len(one.prompt) for one in own] + [0] * (size - len(own))
            padding = torch.tensor(padding, device=self._world.device).unsqueeze(1) if is_padded else None
            found.append(_Rows(own, KeyValueCache(room), padding))
        return found

    def _step(self, rows: Sequence[_Rows], tokens: Sequence[list[list[int]]], begin: int, end: int) -> None:
        """Run the tokens from ``begin`` to ``end`` of each row, and draw the next one of each sequence."""
        # A multiple, since each tensor-parallel rank sends its share. Attention is causal: what pads the step changes
        # nothing, and later tokens overwrite its keys and values.
        more = -(end - begin) % self._tp
        padded = [
            torch.tensor([row + [0] * more for row in each], dtype=torch.int64, device=self._world.device)
            for each in tokens
        ]
        continued = [each.continued(begin, end - begin + more) for each in rows]
        self._draw(rows, self._pipeline.continue_sequences(continued, padded, end - begin - 1))

    def _ring(self, rows: _Rows, begin: int, count: int, stream: "_Stream | None") -> None:
        """On one rank, run so many tokens of each row after ``begin`` and draw the next one after each."""
        continued = [rows.continued(begin + number, 1) for number in range(count)]
        tokens = [torch.tensor(rows.newest(), dtype=torch.int64, device=self._world.device) for _ in range(count)]

        def decide(logits: Tensor, number: int) -> None:
            self._draw([rows], {0: logits})
            if number + 1 < count:
                tokens[number + 1].copy_(torch.tensor(rows.newest()))
            if stream is not None:
                stream.show(rows.sequences[0].drawn)

        self._pipeline.continue_sequences(continued, tokens, 0, decide)

    def _draw(self, rows: Sequence[_Rows], found: Mapping[int, Tensor]) -> None:
        """Draw the next token of each sequence that has not ended.

        Args:
            rows: the micro-batches.
            found: micro-batch -> logits of each row; empty except on ranks with the last stage.
        """
        growing = [
            (one, number, row)
            for number, each in enumerate(rows)
            for row, one in enumerate(each.sequences)
            if not one.has_ended
        ]
        drawn = [
            draw(found[number][row, : self._vocabulary.size], self._sampling, one.draws) if found else 0
            for one, number, row in growing
        ]
        drawn = self._world.broadcast_all(drawn, self._pipeline.last_rank)
        for (one, _, _), token in zip(growing, drawn, strict=True):
            if token in self._vocabulary.ends:
                one.has_ended = True
            else:
                one.drawn.append(token)


def draw(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    """Draw a token.

    Args:
        logits: ``[vocab_size]``.
        sampling: how.
        draws: random numbers.

    Raises:
        RunError: the logits are not finite.
    """
    # On the CPU in float64, so that a seed draws the same tokens on every device.
    logits = logits.double().cpu()
    if not logits.isfinite().all():
        raise RunError(f"the logits of a token must be finite, found {logits[~logits.isfinite()][0]:g}; {NOT_FINITE}")
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
