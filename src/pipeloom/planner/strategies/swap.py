"""Whole stages that visit the one device of a run, in the search: where weights and their state are too large for it.

What a step takes is not bounded, only estimated: as long as its compute, or as what moves meanwhile. A search tries the
few layouts that come first by that.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipeloom.config import OptimizerConfig
from pipeloom.cost.memory import kept_logits
from pipeloom.cost.stages import layers_of_pieces
from pipeloom.errors import UserError
from pipeloom.families import Choice
from pipeloom.planner.question import Question
from pipeloom.planner.settle import Candidate
from pipeloom.planner.space import Leaf
from pipeloom.planner.stage_swaps import SwapQuestion, plan_swaps, question_of
from pipeloom.planner.strategies.strategy import STRATEGIES, Left, Strategy
from pipeloom.recipe import Knobs
from pipeloom.schedule.stage_swaps import NOTHING, Content

FAMILY = "breadth-first"
"""The order that visits each stage twice a step, however many micro-batches there are."""
_MOST_BUDGETS = 6
"""That are tried: what activations leave is only known when the stages are."""


def _swappable(left: Left) -> Iterator[Leaf]:
    """Leaves on one device that do not fit it, whatever is recomputed, and may be swapped through it."""
    for arrangement in left.arrangements:
        run, question = arrangement.run, arrangement.question
        # Only a run on one device can swap its stages.
        is_alone = run.num_devices == 1 and FAMILY in question.families and arrangement.cluster.host is not None
        if not is_alone or arrangement.kept == "some" or arrangement.splits:
            continue
        for cut in arrangement.cuts:
            leaf, loops = next(cut.leaves()), cut.run.loops
            # Where nobody asks for a number of stages, the cut is found by bytes, and one leaf stands for all of them.
            if (_is_number_asked(leaf) or loops == 1) and leaf.narrowed() is None:
                choice = Choice(family=FAMILY, pp=1, loops=loops, num_microbatches=run.num_microbatches)
                yield replace(leaf, choice=choice)


def _is_number_asked(leaf: Leaf) -> bool:
    return leaf.cut.arrangement.question.limits.loops is not None


def _estimate_s(leaf: Leaf) -> float:
    """Seconds of the step, about; infinite where activations leave no room for the largest piece of the model.

    On the way forward each stage is updated and run: all of it comes, weights and state go. On the way back it comes as
    weights, and leaves its gradient. Each way takes as long as its compute, or as what moves.
    """
    asked, count = _question(leaf), leaf.cut.run.num_microbatches
    if max(one.total for one in asked.pieces) > _room(leaf, asked):
        return float("inf")

    def moved_s(content: Content) -> float:
        return sum(one.of(content) for one in asked.pieces) / asked.bytes_per_s

    forward_s = count * sum(asked.forward_s) + sum(asked.update_s)
    way_back_s = max(moved_s(Content.WEIGHTS | Content.BORROWED), moved_s(Content.GRADIENT | Content.LENT_GRADIENT))
    return max(forward_s, moved_s(~NOTHING)) + max(count * sum(asked.backward_s), way_back_s)


def _question(leaf: Leaf) -> SwapQuestion:
    """What is known of the pieces; the budget is not."""
    return question_of(leaf.cut.placed, 0, needs_norm=OptimizerConfig().clips)


def _room(leaf: Leaf, asked: SwapQuestion) -> float:
    """Bytes that a device has for stages, about, beside what all micro-batches keep, their logits included."""
    memory, run, software = leaf.cut.memory, leaf.cut.run, leaf.cut.software
    held = memory.sharded("none").held_bytes(np.full((1, run.loops), float(run.num_microbatches)))
    logits = (run.num_microbatches - 1) * kept_logits(run, software) * (1 + software.fragmentation)
    whole = sum(one.total for one in asked.pieces)
    return float((memory.rooms - held).min()) + whole - logits


def _build(leaf: Leaf) -> Candidate | None:
    """With the cut that is fastest in the bytes that activations leave; ``None`` if they leave too few."""
    asked = _question(leaf)
    budget = _room(leaf, asked)
    for _ in range(_MOST_BUDGETS):
        try:
            chosen = _within(leaf, replace(asked, budget=int(budget)))
        except UserError:  # a piece of the model is larger
            return None
        prediction = chosen.simulate().prediction
        if prediction.fits:
            return chosen
        memory = prediction.memory
        used = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
        # The cut may have left some of the budget unused, so the excess is taken from what it used.
        budget = min(budget, used) - (memory.total_bytes - prediction.device_bytes[0])
    return None


def _within(leaf: Leaf, asked: SwapQuestion) -> Candidate:
    """With so many bytes for stages at once.

    Raises:
        UserError: a piece of the model is larger.
    """
    run = leaf.cut.run
    plan = plan_swaps(asked, [run.num_microbatches], num_stages=run.loops if _is_number_asked(leaf) else None)
    partition, room = plan.partition, plan.schedule.max_resident
    assert room is not None, "stages are swapped"
    choice = replace(leaf.choice, loops=len(partition))
    run = replace(run, loops=len(partition), layers_by_stage=layers_of_pieces(partition))
    knobs = Knobs(choice=choice, device_budget=room, needs_norm=asked.needs_norm)
    return Candidate(leaf.placed("none").of(run), knobs, leaf)


def _hint(question: Question) -> str | None:
    """What somebody whose model does not fit one device may want to know of swapping; ``None`` with several devices."""
    if question.num_devices > 1 or "swap" not in question.software.ways:
        return None
    if question.cluster.host is None:
        return (
            f"Stages could visit the device one after the other if the file of {question.cluster.name} said how fast "
            "it reaches the memory of its host: a table [host] with latency_us and gb_per_s."
        )
    if "swap" not in question.ways or FAMILY not in question.families:
        return f"Stages may visit the device one after the other with the way swap and the family {FAMILY}."
    return (
        "Stages that visit the device one after the other do not fit either, beside what all sequences of a step keep: "
        "a smaller batch, shorter sequences or more recomputation need less."
    )


def _limit(question: Question) -> str | None:
    return "stages are swapped through one device alone" if question.num_devices > 1 else None


STRATEGIES.add(
    "swap",
    Strategy(
        summary="on one device, stages wait at the host until their turn",
        without="all stages on the device",
        applies=_swappable,
        estimate=_estimate_s,
        build=_build,
        is_in=lambda step: step.knobs.device_budget is not None,
        hint=_hint,
        limit=_limit,
    ),
)
