"""Which checkpoint a run goes on from."""

import pytest
from checkpoint_files import write_checkpoint

from pipeloom.checkpoint.checkpoint_choice import Choice, choose_checkpoint, later_checkpoints, refuse_steps
from pipeloom.checkpoint.checkpoint_folder import METADATA
from pipeloom.errors import UserError


@pytest.fixture
def run(tmp_path):
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    return tmp_path


def damage(run, step):
    (run / "checkpoints" / f"step-{step:06}" / METADATA).write_bytes(b"changed")


def path_of(run, step):
    return run / "checkpoints" / f"step-{step:06}"


def test_the_newest_one_is_chosen_where_it_is_whole(run, monkeypatch):
    assert choose_checkpoint(run) == Choice(path_of(run, 6))
    assert choose_checkpoint(path_of(run, 2)) == Choice(path_of(run, 2))
    monkeypatch.chdir(run.parent)
    assert choose_checkpoint(run.relative_to(run.parent)).path == path_of(run, 6)


def test_damaged_and_incomplete_ones_are_passed_over_with_the_reason(run):
    damage(run, 6)
    (path_of(run, 4) / METADATA).unlink()
    choice = choose_checkpoint(run)
    assert choice.path == path_of(run, 2)
    (newest, why), (second, lacks) = choice.damaged
    assert (newest, second, lacks) == (path_of(run, 6), path_of(run, 4), ".metadata is missing")
    assert ".metadata is truncated: 7 bytes, " in why


def test_a_damaged_one_that_is_named_is_refused_with_the_names_of_whole_ones(run):
    damage(run, 6)
    with pytest.raises(UserError, match=r"step-000006 is damaged: .*truncated.*of its run: step-000002, step-000004$"):
        choose_checkpoint(path_of(run, 6))
    damage(run, 2)
    damage(run, 4)
    with pytest.raises(UserError, match="its run has no undamaged one"):
        choose_checkpoint(path_of(run, 6))
    with pytest.raises(UserError, match="all checkpoints in .* are damaged:") as refused:
        choose_checkpoint(run)
    assert [f"  - step-{step:06}: " in str(refused.value) for step in (2, 4, 6)] == [True] * 3


def test_steps_below_those_of_the_checkpoint_are_refused_and_as_many_are_not(run):
    choice = choose_checkpoint(run)
    refuse_steps(choice, 6, run)
    with pytest.raises(UserError, match=r"training\.steps must be at least 6, .* found 5; or resume from an earlier"):
        refuse_steps(choice, 5, run)


def test_whole_checkpoints_of_later_steps_in_the_same_folder_are_refused_and_damaged_ones_are_not(run, tmp_path):
    choice = choose_checkpoint(path_of(run, 4))
    refuse_steps(choice, 9, tmp_path / "other")
    with pytest.raises(UserError, match="has checkpoints of later steps than step-000004"):
        refuse_steps(choice, 9, run)
    damage(run, 6)
    refuse_steps(choice, 9, run)
    refuse_steps(choose_checkpoint(run), 9, run)


def test_a_checkpoint_that_was_put_aside_and_is_whole_again_can_be_named(run):
    aside = path_of(run, 4).rename(path_of(run, 4).with_name("step-000004.damaged"))
    with pytest.raises(UserError, match=r"has checkpoints of later steps than step-000004\.damaged"):
        refuse_steps(choose_checkpoint(aside), 9, run)
    damage(run, 6)
    choice = choose_checkpoint(aside)
    refuse_steps(choice, 9, run)
    assert later_checkpoints(choice.path, run) == [path_of(run, 6)]
