"""PyTorch's runtime loads and lowers what is handed over."""

import importlib.util

import pytest
from families import fitting
from launch_runs import reasons_of, run_of, written_for
from torch.distributed.pipelining import _schedule_visualizer as visualizer

from pipeloom.export.torch_csv import parse_torch_csv
from pipeloom.families import FAMILIES
from pipeloom.schedule import Level


def loaded(folder, num_local, num_stages):
    """What the written module makes: PyTorch's runtime, as rank 0 has it."""
    spec = importlib.util.spec_from_file_location("torch_schedule", folder / "torch_schedule.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stage = visualizer.mock.create_autospec(visualizer.PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, 4, None, num_stages
    return module, module.make_schedule([stage] * num_local, scale_grads=False)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].has_backward])
@pytest.mark.parametrize("placement", ["looped", "v", "linear"])
def test_torch_loads_it_and_its_lowering_is_a_legal_schedule_of_the_same_order(tmp_path, name, placement):
    fits = fitting(name, 2, placement)
    loops = fits["loops"]
    layout, schedule = {"pp": 4, "loops": loops}, {"family": name, "placement": fits["placement"]}
    written_for("torch", tmp_path, layout=layout, schedule=schedule)
    module, runtime = loaded(tmp_path, loops, 4 * loops)
    expected = run_of(layout=layout, schedule=schedule).choice().make()
    assert list(expected.placement.rank_by_stage) == module.RANK_BY_STAGE
    assert sum(module.LAYERS_BY_STAGE) == 10
    orders = runtime.pipeline_order_with_comms
    lowered = parse_torch_csv("".join(",".join(map(str, orders[rank])) + "\n" for rank in range(4)))
    assert lowered.level is Level.COMMUNICATION
    for rank, row in enumerate(expected.rows):
        assert [str(action) for action in orders[rank] if action.is_compute_op] == list(map(str, row))


def test_settings_that_the_runtime_decides_itself_are_named(tmp_path):
    layout = {"loops": 2, "pp": 2, "dp": 2, "shard": "full"}
    written = written_for("torch", tmp_path, layout=layout, schedule={"gradient_buffers": 1})
    printed = "\n".join((*written.notes.left_out, *written.notes.differs))
    for words in ("schedule.residency 2", "schedule.gradient_buffers 1", "schedule.receive_buffers 2", "3 stages"):
        assert words in printed
        assert words in (tmp_path / "torch_schedule.py").read_text().replace("\n# ", " ").replace("  ", " ")


def test_a_tied_matrix_over_two_ranks_is_refused_and_on_one_it_is_not(tmp_path):
    (reason,) = reasons_of("torch", tmp_path, model={"tied": True})
    assert reason.startswith("model.tied: ")
    written_for("torch", tmp_path, model={"tied": True}, schedule={"placement": "v"})


def test_without_a_pipeline_there_is_nothing_to_hand_over(tmp_path):
    (reason,) = reasons_of("torch", tmp_path, layout={"pp": 1})
    assert reason.startswith("layout.pp 1")
