"""What a run that was started again too often ends with."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeloom.config import RestartConfig, RunConfig
from pipeloom.errors import RunError
from pipeloom.training.again import Restarts
from pipeloom.training.automatic import fewer_ranks


@pytest.mark.parametrize(
    ("layout", "more"),
    [("same", []), ("plan", ["restart.layout plan: no layout of fewer ranks takes the batch and the other settings"])],
)
def test_the_error_states_that_no_smaller_layout_was_found(
    monkeypatch: pytest.MonkeyPatch, layout: Any, more: list[str]
):
    monkeypatch.setattr(fewer_ranks, "with_fewer_ranks", lambda config: None)
    config = RunConfig(restart=RestartConfig(times=1, layout=layout))
    restarts = cast("Restarts", SimpleNamespace(config=config, _failures=Counter({1: 2})))
    with pytest.raises(RunError) as caught:
        Restarts._leave_out(restarts, 1, RunError("killed"))
    assert caught.value.__notes__ == ["rank 1 has failed 2 times, more often than restart.times", *more]
