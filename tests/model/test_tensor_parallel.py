"""A stage whose matrices are split computes what the whole stage computes, forward and backward."""

import pytest
import torch
from in_process import blocking_groups_in_process, run_together
from torch.nn import functional

from pipeloom.config import ModelConfig
from pipeloom.model import SplitVocabulary, TensorParallel, build_stage
from pipeloom.model.cross_entropy import IGNORED

VOCAB, TOKENS, ROWS = 13, 12, 3


def config_of(family):
    # Caps so small that they change gradients.
    own = {"window": 5, "logit_softcap": 0.1, "attn_softcap": 0.02} if family.startswith("gemma") else {}
    return ModelConfig(
        family=family, num_layers=2, hidden_size=24, num_heads=12, num_kv_heads=6, head_size=4, ffn_size=20, **own
    ).resolve(VOCAB)


def build(family, pieces, parallel=None):
    given = {} if parallel is None else {"parallel": parallel}
    return build_stage(
        config_of(family), pieces, max_positions=TOKENS, seed=1, dtype=torch.float64, device="cpu", **given
    )


def stages_of(family, pieces, size, *, splits_sequence):
    return [
        build(family, pieces, TensorParallel(group, splits_sequence))
        for group in blocking_groups_in_process([range(size)]).values()
    ]


def tokens():
    return torch.randint(VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))


def joined(stages, what):
    """Every parameter, or its gradient, of the whole stage from the slices; the replicated ones of each rank too."""
    found = {}
    for stage in stages:
        slices = stage.slices()
        for name, parameter in stage.named_parameters():
            part = parameter.grad if what == "gradient" else parameter.detach()
            here = slices[name]
            if here.whole == tuple(part.shape):
                found.setdefault(name, []).append(part)
            else:
                whole = found.setdefault(name, [torch.full(here.whole, torch.nan, dtype=part.dtype)])[0]
                here.of(whole, part.shape).copy_(part)
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3"])
def test_together_the_ranks_hold_the_whole_model_once(family, size):
    whole = dict(build(family, range(4)).named_parameters())
    stages = stages_of(family, range(4), size, splits_sequence=False)
    for name, parts in joined(stages, "value").items():
        for part in parts:
            assert torch.equal(part, whole.pop(name, part))
    assert not whole
    assert sum(p.numel() for p in stages[0].parameters()) < sum(p.numel() for p in build(family, range(4)).parameters())


@pytest.mark.parametrize("splits_sequence", [False, True])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3"])
def test_outputs_and_gradients_equal_those_of_the_whole_model(family, size, splits_sequence):
    whole = build(family, range(4))
    targets = tokens().roll(-1, 1).flatten()
    targets[4] = IGNORED
    loss = functional.cross_entropy(whole(tokens()).flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    loss.backward()
    stages = stages_of(family, range(4), size, splits_sequence=splits_sequence)

    def run(stage):
        def rank():
            logits = stage(tokens()).flatten(0, 1)
            found = SplitVocabulary(stage.parallel, VOCAB).summed_cross_entropy(logits, targets)
            found.backward()
            return found.item()

        return rank

    assert run_together([run(stage) for stage in stages]) == pytest.approx([loss.item()] * size, rel=1e-12)
    gradients = joined(stages, "gradient")
    for name, parameter in whole.named_parameters():
        # without sequence parallelism each rank has the whole gradient, with it that of its own tokens
        parts = gradients[name]
        if splits_sequence:
            parts = [sum(parts)]
        for part in parts:
            torch.testing.assert_close(part, parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("splits_sequence", [False, True])
def test_what_crosses_a_boundary_is_the_ranks_own_tokens(splits_sequence):
    size, middle = 2, range(1, 3)
    x = torch.randn(ROWS, TOKENS, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole, given = build("llama", middle), x.clone().requires_grad_()
    expected = whole(given)
    expected.sin().sum().backward()
    stages = stages_of("llama", middle, size, splits_sequence=splits_sequence)

    def run(stage, part):
        def rank():
            own = part.clone().requires_grad_()
            output = stage(own)
            output.sin().sum().backward()
            return output.detach(), own.grad

        return rank

    results = run_together([run(stage, part) for stage, part in zip(stages, x.chunk(size, 1), strict=True)])
    for (output, gradient), out, grad in zip(results, expected.chunk(size, 1), given.grad.chunk(size, 1), strict=True):
        assert output.shape == (ROWS, TOKENS // size, 24)
        torch.testing.assert_close(output, out.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient, grad, rtol=1e-10, atol=1e-12)


def test_shapes_need_no_other_rank():
    group = blocking_groups_in_process([range(2)])[1]
    stage = build_stage(
        config_of("llama"),
        range(2, 4),
        max_positions=TOKENS,
        seed=1,
        dtype=torch.float64,
        device="meta",
        parallel=TensorParallel(group, splits_sequence=False),
    )
    assert stage(torch.empty(ROWS, TOKENS // 2, 24, dtype=torch.float64, device="meta")).shape == (
        ROWS,
        TOKENS,
        VOCAB - VOCAB // 2,
    )


def test_logits_come_together_for_people():
    logits = torch.arange(13.0)
    groups = [SplitVocabulary(TensorParallel(group), 13) for group in blocking_groups_in_process([range(3)]).values()]

    def run(vocabulary):
        own = vocabulary.parallel.share(13)
        return lambda: vocabulary.whole(logits[own.start : own.stop])

    assert all(torch.equal(found, logits) for found in run_together([run(one) for one in groups]))


def test_very_large_logits_do_not_overflow():
    logits = torch.tensor([[1000.0, -1000.0, 900.0, 0.0]], dtype=torch.float64)
    vocabularies = [
        SplitVocabulary(TensorParallel(group), 4) for group in blocking_groups_in_process([range(2)]).values()
    ]
    halves = [(one, logits[:, 2 * i : 2 * i + 2]) for i, one in enumerate(vocabularies)]
    run = lambda one, part: lambda: one.summed_cross_entropy(part, torch.tensor([2])).item()  # noqa: E731
    assert run_together([run(*half) for half in halves]) == [100.0, 100.0]
