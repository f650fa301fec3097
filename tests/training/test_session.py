"""What the processes of a run take over from the one that starts them."""

import pytest
from small_run import small_run

from pipeloom.training import session
from pipeloom.training.session import load_text, loaded


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
