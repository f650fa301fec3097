"""What the processes of a run take over from the one that starts them."""

import re

import pytest
from small_run import small_run

from pipeloom import train
from pipeloom.errors import WorkerError
from pipeloom.execute.processes.workers import are_forked
from pipeloom.training import session, trainer
from pipeloom.training.session import load_text, loaded
from pipeloom.workload.layout import Layout


@pytest.mark.parametrize("is_again", [False, True])
@pytest.mark.parametrize("forks", [True, False])
def test_a_forked_rank_has_the_data_and_another_one_opens_it_again(
    tmp_path, monkeypatch: pytest.MonkeyPatch, forks: bool, is_again: bool
):
    run = small_run(tmp_path)
    data = load_text(run)
    monkeypatch.setattr(session, "are_forked", lambda: forks)
    found = loaded(data, is_again=is_again)(run)
    assert (found is data) == forks
    assert found.corpus_sha256 == data.corpus_sha256
    assert (found.train.batch(0, 2) == data.train.batch(0, 2)).all()


@pytest.mark.skipif(not are_forked(), reason="ranks import the module as it is")
def test_a_rank_that_fails_while_it_is_built_notes_why(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_arguments, **_settings):
        raise RuntimeError("no luck")

    monkeypatch.setattr(trainer, "make_optimizer", fail)
    with pytest.raises(WorkerError, match="no luck") as failed:
        train(small_run(tmp_path, layout=Layout(pp=1, loops=1)), quiet=True)
    (note,) = (one for one in failed.value.__notes__ if one.startswith("rank 0"))
    assert re.search(r"did nothing for [\d.]+ m?s\n  process \d+ ended with RuntimeError: no luck$", note)
