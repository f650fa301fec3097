"""What is computed while tokens travel to the experts of other ranks."""

from dataclasses import replace

import pytest
import torch

from pipeloom.config import ModelConfig
from pipeloom.errors import UserError
from pipeloom.model import build_stage
from pipeloom.model.expert_parallel import ExpertGroup, ExpertParallel, finished, in_turns
from pipeloom.model.transformer import Layer
from pipeloom.workload.model_families import MODELS

MODEL = ModelConfig(
    num_layers=3, hidden_size=16, num_heads=4, ffn_size=24, experts=4, expert_ffn=12, shared_experts=1, balance="none"
).resolve(50)


class Mirror(ExpertGroup):
    """A group whose other rank sends back what it gets; notes what happens."""

    def __init__(self):
        super().__init__(2, 0)
        self.events = []

    def start(self, received, sent, received_sizes, sent_sizes):
        assert list(received_sizes) == list(sent_sizes)
        received.copy_(sent.detach())
        if sent.ndim == 1:  # numbers of rows
            return lambda: None
        number = sum(event == "start" for event, _ in self.events)
        self.events.append(("start", number))
        return lambda: self.events.append(("end", number))

    def under_way(self):
        """At each end, how many other exchanges are under way."""
        found, open_ = [], set()
        for event, number in self.events:
            if event == "start":
                open_.add(number)
            else:
                open_.remove(number)
                found.append(len(open_))
        assert not open_
        return found


def stage_of(model, group, *, overlaps, recompute="none"):
    sharing = ExpertParallel(group, overlaps)
    built = {"max_positions": 8, "seed": 0, "dtype": torch.float64, "device": "cpu"}
    stage = build_stage(model, range(1, 4), sharing=sharing, **built)
    stage.set_recompute([recompute] * 3)
    with torch.no_grad():
        for name, one in stage.named_parameters():
            if "router" in name:
                one.normal_(generator=torch.Generator().manual_seed(3))
    return stage


def ran(stage, sequences):
    x = torch.randn(sequences, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = stage(x)
    forward = list(stage.layers["0"].feed_forward._sharing.group.events)
    output.square().sum().backward()
    return forward, [output.detach(), x.grad, *(one.grad for one in stage.parameters())]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sequences", [2, 3])
def test_halves_in_turns_compute_what_the_whole_does(sequences, recompute):
    _, expected = ran(stage_of(MODEL, Mirror(), overlaps=False), sequences)
    _, found = ran(stage_of(MODEL, Mirror(), overlaps=True, recompute=recompute), sequences)
    for own, other in zip(found, expected, strict=True):
        assert (own - other).abs().max() < 1e-12


def test_each_exchange_of_a_half_ends_while_one_of_the_other_is_under_way():
    """There and back, in three layers, of two halves: of the forward and of the backward all but the last."""
    group = Mirror()
    forward, _ = ran(stage_of(MODEL, group, overlaps=True), 2)
    every = group.under_way()
    assert len(forward) == 2 * 12
    assert every == [*[1] * 11, 0] * 2


def test_a_recomputed_layer_exposes_its_last_exchange():
    group = Mirror()
    ran(stage_of(MODEL, group, overlaps=True, recompute="full"), 2)
    assert group.under_way() == [1, 1, 1, 0] * (3 + 2 * 3)


def test_one_sequence_is_computed_as_a_whole():
    group = Mirror()
    ran(stage_of(MODEL, group, overlaps=True), 1)
    assert group.under_way() == [0] * 12


class Doubled(Layer):
    """A layer of a family with a forward of its own."""

    def forward(self, x, *others):
        return super().forward(2 * x, *others)


class DoubledInSteps(Doubled):
    """One that halves follow."""

    def steps(self, x, rotary):
        return (yield from super().steps(2 * x, rotary))


def test_a_family_whose_forward_halves_would_not_follow_is_refused(monkeypatch):
    plain = MODELS[MODEL.family]
    own, other = (replace(MODEL, family=name) for name in ("doubled", "doubled-in-steps"))
    monkeypatch.setitem(MODELS._values, own.family, replace(plain, layer=lambda: Doubled))
    monkeypatch.setitem(MODELS._values, other.family, replace(plain, layer=lambda: DoubledInSteps))
    stage_of(own, Mirror(), overlaps=False)
    with pytest.raises(UserError, match="layout.ep_overlap: Doubled of model.family doubled overrides forward"):
        stage_of(own, Mirror(), overlaps=True)
    _, expected = ran(stage_of(own, Mirror(), overlaps=False), 2)
    _, found = ran(stage_of(other, Mirror(), overlaps=True), 2)
    assert (found[0] - expected[0]).abs().max() < 1e-12


def test_shared_experts_are_computed_while_tokens_travel():
    """Products into them there, out of them back, and in the backward the other way round."""
    group = Mirror()
    stage = stage_of(replace(MODEL, num_layers=3), group, overlaps=False)
    shared = stage.layers["2"].feed_forward.shared
    for name in ("gate", "up", "down"):
        getattr(shared, name).register_forward_hook(lambda *_, name=name: group.events.append((name, None)))
        getattr(shared, name).weight.register_hook(lambda _, name=name: group.events.append((f"d {name}", None)))
    ran(stage, 2)
    events = [event for event, _ in group.events]
    begin = events.index("down") - 3
    assert events[begin : begin + 5] == ["start", "end", "start", "down", "end"]
    back = events.index("d down") - 1
    assert events[back : back + 4] == ["start", "d down", "end", "start"]
    assert set(events[back + 4 : back + 6]) == {"d gate", "d up"}
    assert events[back + 6] == "end"


def test_two_computations_go_on_in_turns():
    seen = []

    def steps(name):
        for part in range(3):
            seen.append(f"{name}{part}")
            yield
        return name

    assert in_turns(steps("a"), steps("b")) == ("a", "b")
    assert seen == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert finished(steps("c")) == "c"
