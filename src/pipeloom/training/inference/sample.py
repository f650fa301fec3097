"""Samples text from the model, through the pipeline."""

import torch

from pipeloom.config import RunConfig
from pipeloom.data.text import Data
from pipeloom.data.windows import without_marks
from pipeloom.execute.processes.world import World
from pipeloom.runs.sample import Sample
from pipeloom.training.pipeline import Pipeline

# Below 1, so that a short sample has few unlikely tokens.
_TEMPERATURE = 0.8
# A line or two of context.
_PROMPT_TOKENS = 40


def sample_text(pipeline: Pipeline, world: World, data: Data, config: RunConfig) -> Sample:
    """Continue the beginning of the validation text by ``training.sample_tokens`` tokens.

    Each token is one forward-only step of a single micro-batch. The rank of the last stage draws the token and
    broadcasts it. Collective: every rank calls it.
    """
    tokenizer, seq_len = data.tokenizer, config.data.seq_len
    generator = torch.Generator().manual_seed(config.training.seed)
    prompt = tokenizer.decode(without_marks(data.validation.batch(0, 1))[0, :_PROMPT_TOKENS])
    tokens = tokenizer.encode(prompt.encode()).tolist()
    for _ in range(config.training.sample_tokens):
        # Positions are learned or rotated up to ``seq_len`` only.
        seen = tokens[-seq_len:]
        # Full length: the messages between stages have fixed shapes.
        # Attention is causal, so the padding changes nothing.
        padded = torch.tensor([seen + [0] * (seq_len - len(seen))], device=world.device)
        logits = pipeline.next_logits(padded, len(seen) - 1)
        drawn = 0
        if logits is not None:
            logits = logits[: tokenizer.vocab_size]  # the model's vocabulary may be padded
            # On the CPU in float64, so that a seed draws the same tokens on every device.
            probabilities = torch.softmax(logits.double().cpu() / _TEMPERATURE, dim=-1)
            drawn = int(torch.multinomial(probabilities, 1, generator=generator))
        # The rank of the first stage needs the token for the next forward.
        tokens.append(world.broadcast(drawn, pipeline.last_rank))
    text = tokenizer.decode(tokens)
    # Of the whole: a tokenizer may decode the first token of a text otherwise than one behind others.
    return Sample(prompt, text.removeprefix(prompt))
