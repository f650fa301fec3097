"""Text from the model, through the pipeline."""

import torch

from pipeloom.config import RunConfig
from pipeloom.data.text import Data
from pipeloom.execute.processes.world import World
from pipeloom.training.pipeline import Pipeline

# Below 1: fewer unlikely tokens, so that a short sample shows what was learned.
_TEMPERATURE = 0.8
# A line or two: enough for the sample to show that it continues the text.
_PROMPT_TOKENS = 40


def sample_text(pipeline: Pipeline, world: World, data: Data, config: RunConfig) -> str:
    """Continue the beginning of the validation text by ``training.sample_tokens``, one token at a time.

    Each token is one forward-only step of a single micro-batch; the rank with the last stage draws the
    token and sends it to the others. Every rank calls this and returns the same text.
    """
    tokenizer, seq_len = data.tokenizer, config.data.seq_len
    generator = torch.Generator().manual_seed(config.training.seed)
    prompt = tokenizer.decode(data.validation.batch(0, 1)[0, :_PROMPT_TOKENS])
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
            known = logits[: tokenizer.vocab_size]  # the model may have room for more tokens than there are
            # On the CPU in float64, so that a seed draws the same tokens on every device.
            chances = torch.softmax(known.double().cpu() / _TEMPERATURE, dim=-1)
            drawn = int(torch.multinomial(chances, 1, generator=generator))
        # All ranks need the token: the next forward begins on the first one.
        tokens.append(world.broadcast(drawn, pipeline.last_rank))
    return tokenizer.decode(tokens)
