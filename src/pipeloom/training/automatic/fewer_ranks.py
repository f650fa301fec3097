"""A layout for the ranks that are left, with the same batches."""

from dataclasses import replace

from pipeloom.config import RunConfig, training_problems
from pipeloom.errors import UserError
from pipeloom.planner.fewer_nodes import question_on
from pipeloom.planner.plan import plan
from pipeloom.planner.run_file import run_config
from pipeloom.predict.describe import described_run
from pipeloom.training.adapted import with_adapted_check
from pipeloom.workload.dtypes import precision_of

_MOST_ROWS = 20


def with_fewer_ranks(config: RunConfig) -> RunConfig | None:
    """The run on as many ranks as possible below those that it has; ``None`` if no layout has its batch.

    Args:
        config: resolved.
    """
    for num_ranks in range(config.layout.num_ranks - 1, 0, -1):
        found = _planned(config, num_ranks)
        if found is not None:
            return found
    return None


def _planned(config: RunConfig, num_ranks: int) -> RunConfig | None:
    run = described_run(config, precision_of(config.training.known_dtype) or "fp32")
    try:
        question = question_on(config, run, config.machine.cluster, "pipeloom", num_devices=num_ranks)
        question = question.limited(strategies=("none",))
        steps = plan(question, _MOST_ROWS, explains=False, budget_s=10.0).steps
    except UserError:  # no layout divides the ranks and the batch
        return None
    for step in steps:
        planned = run_config(step, None, config.machine.cluster, "pipeloom")
        found = replace(config.under(planned.layout), schedule=planned.schedule)
        if not with_adapted_check(training_problems)(found, is_model_known=True):
            return found
    return None
