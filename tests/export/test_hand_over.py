"""What all targets have in common: what is written, what is refused, what is left alone."""

import errno
import os
from pathlib import Path

import pytest
from launch_runs import CLUSTER, run_of

from pipeloom.errors import ConfigError, UserError
from pipeloom.export import TARGETS, hand_over
from pipeloom.export.job import Site


def names(folder):
    return {file.name for file in folder.iterdir()}


def test_without_targets_everything_that_can_express_the_run_is_written(tmp_path):
    done = hand_over(run_of(), CLUSTER, tmp_path / "new" / "folder", site=Site(image="registry.example.org/pipeloom:1"))
    assert [written.target.name for written in done.written] == list(TARGETS)
    assert done.refused == ()
    assert names(done.folder) == {name for target in TARGETS.values() for name in target.files}
    assert {file.name for written in done.written for file in written.files} == names(done.folder)


def test_what_is_refused_is_not_left_from_an_earlier_call_and_the_rest_is(tmp_path):
    hand_over(run_of(), CLUSTER, tmp_path)
    done = hand_over(run_of(schedule={"placement": "v"}), CLUSTER, tmp_path, ["megatron"])
    assert [refused.target.name for refused in done.refused] == ["megatron"]
    assert "megatron.sh" not in names(tmp_path)
    assert "torchtitan.sh" in names(tmp_path)


@pytest.mark.parametrize("target", ["torch", "torchtitan", "megatron"])
def test_other_programs_do_not_cut_sequences(tmp_path, target):
    done = hand_over(run_of(layout={"token_slices": 2}), CLUSTER, tmp_path, [target])
    assert [len(refused.reasons) for refused in done.refused] == [1]
    assert done.refused[0].reasons[0].startswith("layout.token_slices 2: ")


@pytest.mark.parametrize("target", ["torch", "torchtitan", "megatron"])
def test_other_programs_do_not_code_messages(tmp_path, target):
    done = hand_over(run_of(layout={"boundary": "int8"}), CLUSTER, tmp_path, [target])
    assert [len(refused.reasons) for refused in done.refused] == [1]
    assert done.refused[0].reasons[0].startswith("layout.boundary: ")


def test_files_of_others_are_neither_replaced_nor_removed(tmp_path):
    for name in ("torchrun.toml", "megatron.sh"):
        (tmp_path / name).write_text("mine\n")
    with pytest.raises(UserError, match=r"files that pipeloom did not write: megatron.sh, torchrun.toml"):
        hand_over(run_of(schedule={"placement": "v"}), CLUSTER, tmp_path)
    assert (tmp_path / "torchrun.toml").read_text() == (tmp_path / "megatron.sh").read_text() == "mine\n"
    assert names(tmp_path) == {"torchrun.toml", "megatron.sh"}


def test_a_wrong_run_is_refused_with_all_its_problems(tmp_path):
    wrong = run_of(model={"num_heads": 5}, optimizer={"lr": -1.0})
    with pytest.raises(ConfigError) as caught:
        hand_over(wrong, CLUSTER, tmp_path / "none")
    assert len(caught.value.problems) >= 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("time_limit", ["", "soon", "1:2", "24:00:00:00"])
def test_a_time_limit_that_is_no_time_is_refused(tmp_path, time_limit):
    with pytest.raises(UserError, match="as sbatch takes it"):
        hand_over(run_of(), CLUSTER, tmp_path, site=Site(time_limit=time_limit))


def test_all_wrong_names_are_reported_together_before_anything_is_written(tmp_path):
    site = Site(name='My "run": 1', image="a b", volume="pipeloom")
    with pytest.raises(UserError) as caught:
        hand_over(run_of(), CLUSTER, tmp_path / "none", site=site)
    for part in ("the name of the job must be", "the volume must be NAME:/FOLDER", "the image must be like"):
        assert part in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_containers_are_written_only_where_they_are_named_or_have_an_image(tmp_path):
    done = hand_over(run_of(), CLUSTER, tmp_path)
    assert not {"kubeflow", "skypilot"} & {one.target.name for one in (*done.written, *done.refused)}
    done = hand_over(run_of(), CLUSTER, tmp_path, ["kubeflow", "skypilot"])
    assert all("--image is missing" in refused.reasons[0] for refused in done.refused)
    assert len(done.refused) == 2


def test_an_unknown_target_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(UserError, match="there is no target deepspeed; known: torchrun, slurm"):
        hand_over(run_of(), CLUSTER, tmp_path, ["torch", "deepspeed"])


def test_a_full_disk_leaves_the_files_of_an_earlier_call(tmp_path, monkeypatch):
    hand_over(run_of(), CLUSTER, tmp_path, ["torchrun", "slurm"])
    before = {file.name: file.read_text() for file in tmp_path.iterdir()}
    write, written = Path.write_text, []

    def write_text(file, text, **more):
        written.append(file)
        if len(written) == 2:
            write(file, text[:10], **more)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, text, **more)

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(UserError, match="cannot write to .*: No space left on device"):
        hand_over(run_of(layout={"dp": 2}), CLUSTER, tmp_path, ["torchrun", "slurm"])
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_written_to_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        hand_over(run_of(), CLUSTER, tmp_path / "file" / "folder")
