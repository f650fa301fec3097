"""``layout.loops auto`` in a run: what it chooses by, what it leaves behind, and how a resumed run keeps it."""

from dataclasses import replace

from small_run import small_run

from pipeloom.config import CheckpointConfig, OutputConfig, RunConfig
from pipeloom.config.automatic_loops import candidates
from pipeloom.config.file import read_run_file
from pipeloom.training.automatic.interleaving import described, simplest
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout


def steps_of(*seconds):
    runs = [run for runs in candidates(RunConfig(layout=Layout(pp=2, loops="auto"))) for run in runs]
    return list(zip(runs, seconds, strict=True))


def test_the_simplest_is_chosen_of_predictions_that_are_equal_within_the_error():
    equal = steps_of(1.04, 1.03, 1.02, 1.00, 1.01)
    assert simplest(equal) is equal[0][0]
    unequal = steps_of(1.20, 1.30, 1.10, 1.03, 1.00)
    assert simplest(unequal) is unequal[3][0]


def test_a_line_has_the_choice_and_the_prediction_of_each_candidate():
    steps = steps_of(0.440, 0.420, 0.410, 0.300, 0.310)
    assert described(steps, steps[3][0]) == (
        "loops      2 (breadth-first): simplest within 5% of the fastest; predicted ms: 1 (1f1b) 440, "
        "1 (breadth-first) 420, 1 (zb-h2) 410, 2 (breadth-first) 300, 4 (breadth-first) 310"
    )


def test_the_run_folder_has_the_chosen_number_and_family_which_a_resumed_run_keeps(tmp_path, capfd):
    config = small_run(tmp_path, layout=Layout(pp=2, loops="auto", num_microbatches=2))
    config = replace(config, checkpoint=CheckpointConfig(final="checkpoint"))
    config = replace(config, model=replace(config.model, num_layers=2))
    train(config)
    assert "\nloops      " in capfd.readouterr().out
    file = tmp_path / "run" / "config.toml"
    first, _ = read_run_file(file)
    assert first.layout.loops in (1, 2)
    assert first.schedule.family in ("1f1b", "breadth-first", "zb-h2")
    assert len(first.layout.partition) == first.layout.num_stages
    # A family that auto never chooses, so that another choice would show.
    file.write_text(file.read_text().replace(f'family = "{first.schedule.family}"', 'family = "depth-first"'))

    again = replace(config, output=OutputConfig(folder=tmp_path / "again"))
    train(replace(again, checkpoint=CheckpointConfig(resume=tmp_path / "run", final="none")))
    kept, _ = read_run_file(tmp_path / "again" / "config.toml")
    assert (kept.layout.loops, kept.schedule.family) == (first.layout.loops, "depth-first")
    assert "\nloops      " not in capfd.readouterr().out
