"""``pipeloom report``."""

import subprocess
import sys

from run_files import without_its_end, write_run

from pipeloom.cli import main


def test_the_page_is_written_into_the_run_folder_and_named(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    page = run / "report.html"
    first, *verdict = capsys.readouterr().out.splitlines()
    assert first == f"report     {page}"
    assert verdict[0].startswith("step       measured ")
    assert page.read_text().startswith("<!doctype html>")
    assert main(["report", str(run)]) == 0  # and again


def test_the_page_can_go_elsewhere(tmp_path):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()
    assert not (run / "report.html").exists()


def test_a_file_that_is_no_page_is_not_replaced(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    before = (run / "config.toml").read_text()
    assert main(["report", str(run), "--output", str(run / "config.toml")]) == 2
    assert "--output replaces a file whose name ends in .html, found" in capsys.readouterr().err
    assert (run / "config.toml").read_text() == before


def test_a_run_without_an_end_has_a_page_and_the_terminal_says_that_it_has_not_finished(tmp_path, capsys):
    run = without_its_end(write_run(tmp_path / "run"), "trace.json", steps=2)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"report     {run / 'report.html'}",
        "step       measured 120 ms a step (median); no predicted step time, which a run writes at its end",
        "           to separate causes from noise, 5 steps after the first are needed, found 1",
        "           This run has not finished. It is not running any more. 2 of 5 steps are done.",
        "           The page lists what is missing, and why.",
    ]


def test_a_report_needs_no_torch(tmp_path):
    run = write_run(tmp_path / "run")
    code = (
        "import sys; from pipeloom.cli import main; status = main(['report', sys.argv[1]]); "
        "assert not {'torch', 'matplotlib'} & set(sys.modules); sys.exit(status)"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, timeout=60)


def test_simulating_the_configuration_of_a_run_names_what_the_run_took(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    config = str(run / "config.toml")
    for named in (config, str(run)):
        assert main(["simulate", named]) == 0
        out = capsys.readouterr().out
        assert f"the run in {run} took 120 ms a step, and its profiled stages predicted 90.0 ms" in out
        assert "`pipeloom profile --processes 2 --output here.toml`" in out
    assert main(["simulate", config, "--layout.num-microbatches", "16"]) == 0
    assert f"the run in {run}, before flags changed its layout, took 120 ms a step" in capsys.readouterr().out
    (tmp_path / "run" / "summary.json").write_text('{"step_time_s": null}')
    assert main(["simulate", config]) == 0
    assert "the run in" not in capsys.readouterr().out
