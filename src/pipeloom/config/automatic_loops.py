"""``layout.loops auto``: which numbers and families a run chooses from, and what it does not work with."""

from collections.abc import Iterator

from pipeloom.config.run import RunConfig, value_of
from pipeloom.families import AUTO


def candidates(config: RunConfig) -> list[list[RunConfig]]:
    """The runs that ``layout.loops auto`` chooses from, the simplest first; those of a list have the same actions.

    Numbers are powers of two up to 8 for which there are enough pieces of the model. With ``schedule.family auto``,
    one loop is 1F1B, which holds least, breadth-first, which hides messages, or ZB-H2, whose weight gradients fill the
    bubble; more loops are breadth-first.
    """
    named = config.schedule.family
    found: list[list[RunConfig]] = []
    for number in config.layout.automatic_loops(config.model.num_layers + 2):
        first = [["1f1b", "breadth-first"], ["zb-h2"]] if number == 1 else [["breadth-first"]]
        for families in first if named == AUTO else [[named]]:
            runs = [config.with_loops(number, name) for name in families]
            found.append([run for run in runs if not run.choice().problems()])
    return [runs for runs in found if runs]


def loops_problems(config: RunConfig) -> Iterator[str]:
    """Settings that ``layout.loops auto`` does not work with, one sentence each."""
    schedule, training = config.schedule, config.training
    if not config.layout.is_automatic:
        return
    if not config.layout.has_pipeline:
        yield "layout.loops auto compares pipelines, found layout.pp 1; set a number of layout.loops"
    refused = {
        "layout.partition": value_of(config, "layout.partition") is not None,
        "layout.token_slices": value_of(config, "layout.token_slices") not in (None, 1),
        "schedule.keep": schedule.keep is not None,
        "schedule.balance": schedule.balance,
        "schedule.offload": schedule.offload,
        "schedule.device_budget": schedule.device_budget is not None,
        "schedule.file": schedule.file is not None,
        "training.compile": training.compile,
        "training.predict false": not training.predict,
    }
    for name, is_on in refused.items():
        if is_on:
            yield f"layout.loops auto does not work with {name}; set a number of layout.loops, or leave {name} out"
