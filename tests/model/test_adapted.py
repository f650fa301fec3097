"""Models of transformers' own types as pieces: gradients of the whole model, the same first values, and refusals."""

import json

import pytest
import torch
from adapted_types import LENGTH, PARTS, VOCAB, largest_difference, make_adapted, small_config, text_of

from pipeloom.model.adapted import adapted_stage, piece_parameters
from pipeloom.model.adapted_check import check_adapted


@pytest.mark.parametrize("kind", ["gpt_neox", "gemma", "cohere", "mixtral"])
def test_pieces_have_the_gradients_of_the_whole_model(kind):
    assert largest_difference(kind) < 1e-9


def test_first_values_do_not_depend_on_the_partition():
    text = text_of(small_config("gemma"))
    whole = dict(adapted_stage(text, range(6), seed=3, dtype=torch.float64, device="cpu").named_parameters())
    found = {}
    for part in PARTS:
        stage = adapted_stage(text, part, seed=3, dtype=torch.float64, device="cpu")
        found |= dict(stage.named_parameters())
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    other = dict(adapted_stage(text, range(6), seed=4, dtype=torch.float64, device="cpu").named_parameters())
    assert any(not torch.equal(other[name], whole[name]) for name in whole)


def test_recomputation_runs_the_layers_again():
    text = text_of(small_config("gpt_neox"))
    stage = adapted_stage(text, range(6), seed=0, dtype=torch.float64, device="cpu")
    stage.set_recompute(["none", "full", "none", "none"])
    calls = [0] * 4
    for index, layer in enumerate(stage.model.gpt_neox.layers):

        def count(*_, index=index):
            calls[index] += 1

        layer.attention.register_forward_hook(count)
    stage(torch.zeros(1, LENGTH, dtype=torch.int64)).sum().backward()
    assert calls == [1, 2, 1, 1]


def test_pieces_are_balanced_by_what_they_multiply_with():
    _, text = make_adapted("gemma")
    first, *layers, last = piece_parameters(text)
    assert first == 1
    assert len(set(layers)) == 1
    assert last == VOCAB * 32 + 32


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("opt", {}, "opt of transformers"),
        ("bert", {}, "its logits depend on later tokens"),
        ("gpt_neo", {"resid_dropout": 0.5}, "draws random numbers"),
    ],
)
def test_a_type_that_does_not_run_in_pieces_is_refused_by_name(kind, settings, words):
    table = {**json.loads(text_of(small_config(kind))), **settings}
    assert words in (check_adapted(json.dumps(table)) or "")
