"""The strategy ``swap``: on a run of one device that cannot hold the model, stages are swapped with the host.

The step time is estimated as the longer of compute and transfers; the search tries the few layouts with the lowest
estimates.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipeloom.cost.memory import kept_logits
from pipeloom.cost.stages import layers_of_pieces
from pipeloom.errors import UserError
from pipeloom.families import Choice
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.question import Question
from pipeloom.planner.space import Leaf
from pipeloom.planner.stage_swaps import SwapQuestion, plan_swaps, question_of
from pipeloom.planner.strategies.strategy import STRATEGIES, SearchState, Strategy
from pipeloom.recipe import Knobs
from pipeloom.schedule.stage_swaps import NOTHING, Content

FAMILY = "breadth-first"
"""The schedule that visits each stage twice in a step, for any number of micro-batches."""
_MOST_BUDGETS = 6
"""Device budgets to try: the memory that activations leave depends on the stages."""


def _swappable(state: SearchState) -> Iterator[Leaf]:
    """Leaves on one device that do not fit it, whatever is recomputed."""
    for arrangement in state.arrangements:
        run, question = arrangement.run, arrangement.question
        # Only a run on one device can swap its stages.
        is_alone = run.num_devices == 1 and FAMILY in question.families and arrangement.cluster.host is not None
        if not is_alone or arrangement.recomputed == "some" or arrangement.splits:
            continue
        for cut in arrangement.cuts:
            leaf, loops = next(cut.leaves()), cut.run.loops
            # Without a limit on loops the bytes determine the stages, and one leaf represents all numbers of stages.
            if (_has_fixed_loops(leaf) or loops == 1) and leaf.bounded is None:
                choice = Choice(family=FAMILY, pp=1, loops=loops, num_microbatches=run.num_microbatches)
                yield replace(leaf, choice=choice)


def _has_fixed_loops(leaf: Leaf) -> bool:
    return leaf.cut.arrangement.question.limits.loops is not None


def _estimate_s(leaf: Leaf) -> float:
    """Estimated seconds of a step; infinite if the largest piece of the model does not fit beside the activations.

    In the forward pass each stage is updated and run: everything is loaded, weights and state are stored. In the
    backward pass weights are loaded and gradients stored. Each pass takes the maximum of its compute and its transfers.
    """
    question, count = _question(leaf), leaf.cut.run.num_microbatches
    if max(one.total for one in question.pieces) > _budget(leaf, question):
        return float("inf")

    def moved_s(content: Content) -> float:
        return sum(one.of(content) for one in question.pieces) / question.bytes_per_s

    forward_s = count * sum(question.forward_s) + sum(question.update_s)
    backward_moves_s = max(
        moved_s(Content.WEIGHTS | Content.BORROWED), moved_s(Content.GRADIENT | Content.LENT_GRADIENT)
    )
    return max(forward_s, moved_s(~NOTHING)) + max(count * sum(question.backward_s), backward_moves_s)


def _question(leaf: Leaf) -> SwapQuestion:
    """The pieces of a leaf's model, without a budget."""
    return question_of(leaf.cut.placed, 0, needs_norm=leaf.cut.arrangement.question.update.needs_norm)


def _budget(leaf: Leaf, question: SwapQuestion) -> float:
    """Estimated bytes for stages on the device: its memory without the activations and logits of all micro-batches."""
    memory, run, software = leaf.cut.memory, leaf.cut.run, leaf.cut.software
    held = memory.sharded("none").held_bytes(np.full((1, run.loops), float(run.num_microbatches)))
    logits = (run.num_microbatches - 1) * kept_logits(run, software) * (1 + software.fragmentation)
    whole = sum(one.total for one in question.pieces)
    return float((memory.capacity_bytes - held).min()) + whole - logits


def _build(leaf: Leaf) -> Candidate | None:
    """The fastest partition within the memory that activations leave; ``None`` if they leave too little."""
    question = _question(leaf)
    budget = _budget(leaf, question)
    for _ in range(_MOST_BUDGETS):
        try:
            chosen = _within(leaf, replace(question, budget=int(budget)))
        except UserError:  # a piece of the model is larger
            return None
        prediction = chosen.simulate().prediction
        if chosen.has_room_for(prediction):
            return chosen
        memory = prediction.memory
        used = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
        # The partition may use less than the budget, so the excess is subtracted from what it uses.
        budget = min(budget, used) - (memory.total_bytes - float(leaf.cut.memory.capacity_bytes[0]))
    return None


def _within(leaf: Leaf, question: SwapQuestion) -> Candidate:
    """The leaf swapped within the budget of a question.

    Raises:
        UserError: a piece of the model is larger.
    """
    run = leaf.cut.run
    plan = plan_swaps(question, [run.num_microbatches], num_stages=run.loops if _has_fixed_loops(leaf) else None)
    partition, room = plan.partition, plan.schedule.max_resident
    assert room is not None, "stages are swapped"
    choice = replace(leaf.choice, loops=len(partition))
    run = replace(run, loops=len(partition), layers_by_stage=layers_of_pieces(partition))
    knobs = Knobs(choice=choice, device_budget=room, needs_norm=question.needs_norm)
    return Candidate(leaf.placed("none").of(run), knobs, leaf)


def _hint(question: Question) -> str | None:
    """How swapping could help a model that does not fit one device; ``None`` with several devices."""
    if question.num_devices > 1 or "swap" not in question.software.strategies:
        return None
    if question.cluster.host is None:
        return (
            f"Stages could be swapped through the device one after the other if the file of {question.cluster.name} "
            "had the link to the host: a table [host] with latency_us and gb_per_s."
        )
    if reasons := question.left_out.why("strategy swap"):
        return f"Stages could be swapped through the device one after the other, but {'; '.join(reasons)}."
    if "swap" not in question.strategies or FAMILY not in question.families:
        return f"The strategy swap with the family {FAMILY} could swap stages through the device one after the other."
    return (
        "Stages that are swapped through the device one after the other do not fit either, beside the activations of "
        "all sequences of a step: a smaller batch, shorter sequences or more recomputation need less memory."
    )


def _limit(question: Question) -> str | None:
    return "stages are swapped through one device alone" if question.num_devices > 1 else None


STRATEGIES.add(
    "swap",
    Strategy(
        summary="on one device, keep most stages in host memory",
        without="all stages on the device",
        applies=_swappable,
        estimate=_estimate_s,
        build=_build,
        is_in=lambda step: step.knobs.device_budget is not None,
        takes_frozen=False,
        hint=_hint,
        limit=_limit,
    ),
)
