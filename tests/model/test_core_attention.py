"""Attention with windows and soft caps equals its definition, by every kernel."""

import pytest
import torch

from pipeloom.model import core_attention as module
from pipeloom.model.core_attention import Scores, core_attention, flexible
from pipeloom.model.visible_keys import Documents, VisibleKeys

SCALE = 0.3
CASES = [
    # heads, key heads, queries, keys, window, soft cap
    (4, 2, 13, 13, 4, 0.0),
    (4, 4, 7, 17, 6, 2.0),
    (6, 2, 12, 12, None, 1.5),
    (2, 1, 1, 9, 3, 0.0),
    (2, 2, 5, 9, 9, 0.0),
    (2, 1, 9, 9, 1, 0.5),
]


def by_definition(query, key, value, window, softcap, also=True):
    groups, begin = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    scores = query @ key.repeat_interleave(groups, 1).mT * SCALE
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(query.shape[2])[:, None] + begin - torch.arange(key.shape[2])
    sees = (distance >= 0) & (distance < (window or 100)) & also
    return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1)


def inputs(heads, key_heads, queries, keys, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, queries, heads, 6, generator=draw, dtype=torch.float64).transpose(1, 2)
    others = (torch.randn(2, key_heads, keys, 6, generator=draw, dtype=torch.float64) for _ in range(2))
    return [one.to(dtype).requires_grad_() for one in (query, *others)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [5, 128])
def test_blocks_of_queries_have_the_values_and_gradients_of_the_definition(case, block, monkeypatch):
    *sizes, window, softcap = case
    monkeypatch.setattr(module, "BLOCK", block)
    given = inputs(*sizes)
    visible = VisibleKeys(sizes[3] - sizes[2], window)
    found = core_attention(*given, visible=visible, scale=SCALE, softcap=softcap)
    expected = by_definition(*given, window, softcap)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert (found - expected).abs().max() < 1e-14
    for one, other in zip(
        torch.autograd.grad(found, given, gradient), torch.autograd.grad(expected, given, gradient), strict=True
    ):
        assert (one - other).abs().max() < 1e-13


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_of_gpus_sees_the_same_keys(case):
    *sizes, window, softcap = case
    given = [one.detach() for one in inputs(*sizes)]
    found = flexible(*given, VisibleKeys(sizes[3] - sizes[2], window), Scores(SCALE, softcap))
    assert (found - by_definition(*given, window, softcap)).abs().max() < 1e-14


def test_bfloat16_is_as_close_as_its_rounding():
    given = inputs(4, 2, 33, 33, torch.bfloat16)
    found = core_attention(*given, visible=VisibleKeys(0, 8), scale=SCALE, softcap=3.0)
    assert found.dtype == torch.bfloat16
    wide = [one.detach().double().requires_grad_() for one in given]
    expected = by_definition(*wide, 8, 3.0)
    assert (found - expected).abs().max() < 0.02
    found.sum().backward()
    expected.sum().backward()
    for one, other in zip(given, wide, strict=True):
        assert one.grad.dtype == torch.bfloat16
        assert (one.grad - other.grad).abs().max() < 0.02 * other.grad.abs().max()


def test_a_window_of_all_keys_is_no_window():
    visible = VisibleKeys(3, 9)
    assert visible.within(9) == VisibleKeys(3)
    assert visible.within(10) == visible
    assert visible.of_queries(range(8, 10)) == range(3, 13)


def with_borders(heads, key_heads, queries, keys):
    """Two sequences, the second one document: where the queries' documents begin, and which keys count."""
    firsts = torch.zeros(2, keys, dtype=torch.int64)
    firsts[0, 3:] = 3
    firsts[0, keys - 2 :] = keys - 2
    sees = torch.arange(keys) >= firsts[:, keys - queries :, None]
    return Documents(firsts[:, keys - queries :]), sees.unsqueeze(1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", [*CASES, (4, 2, 13, 13, None, 0.0), (4, 2, 5, 13, None, 0.0)])
@pytest.mark.parametrize("block", [5, 128])
def test_every_kernel_ends_at_borders_of_documents(case, block, monkeypatch):
    *sizes, window, softcap = case
    monkeypatch.setattr(module, "BLOCK", block)
    given = inputs(*sizes)
    documents, sees = with_borders(*sizes)
    visible = VisibleKeys(sizes[3] - sizes[2], window, documents)
    expected = by_definition(*given, window, softcap, sees)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = core_attention(*given, visible=visible, scale=SCALE, softcap=softcap)
    assert (found - expected).abs().max() < 1e-14
    for one, other in zip(
        torch.autograd.grad(found, given, gradient), torch.autograd.grad(expected, given, gradient), strict=True
    ):
        assert (one - other).abs().max() < 1e-13
    found = flexible(*(one.detach() for one in given), visible, Scores(SCALE, softcap))
    assert (found - expected).abs().max() < 1e-14
