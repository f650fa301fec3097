"""The page in a browser without a window, where there is one."""

import re
import shutil
import subprocess

import pytest
from run_files import write_run

from pipeloom.page import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=3000",
    "--window-size=1280,900",
    "--dump-dom",
]
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome on PATH")


@pytest.fixture
def show(tmp_path):
    """The page's document, scripts left out, after they have run, and after ``then``, if given."""

    def open_in_browser(run, then=""):
        page = write_report(run)
        if then:
            page.write_text(page.read_text().replace("</body>", f"<script>{then}</script></body>"))
        command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S)

    return open_in_browser


def data(document):
    return dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<html[^>]*>", document)[0]))


def test_the_script_runs_and_draws_every_box_table_and_curve(show, tmp_path):
    text = "</script><script>document.documentElement.dataset.broken = 'yes'</script>"
    document = show(write_run(tmp_path / "run", sample=text))
    assert data(document) == {"state": "ready", "boxes": "64", "expected": "64"}
    assert "0.0 to 56.0 ms" in document
    assert len(re.findall(r"<rect ", document)) == 2 * 3 * 5  # traces, ranks and their total, causes
    assert len(re.findall(r"<tr[ >]", document)) == (2 + 4) + (2 + 5)
    assert len(re.findall(r"<svg ", document)) == 1 + 2 * 2 + 2  # the step, two charts of two ranks, loss and times
    assert "document.documentElement.dataset.broken = 'yes'&lt;/script&gt;" in document
    assert "NaN" not in document


def test_both_timelines_zoom_together_and_show_their_lanes(show, tmp_path):
    then = """
      const buttons = document.querySelectorAll(".toolbar button");
      const heights = [document.querySelector("canvas").height];
      document.getElementById("lanes").click();
      heights.push(document.querySelector("canvas").height);
      buttons[0].click();
      root.dataset.grown = heights[1] > heights[0];
      root.dataset.zoomed = document.querySelector(".view").textContent;
      root.dataset.fewer = root.dataset.boxes;
      buttons[2].click();
    """
    found = data(show(write_run(tmp_path / "run"), then))
    assert found["state"] == "ready"
    assert found["grown"] == "true"
    assert found["zoomed"] == "14.0 to 42.0 ms"
    assert 0 < int(found["fewer"]) < 64 == int(found["boxes"])


def test_hovering_an_action_tells_both_times(show, tmp_path):
    then = """
      const canvas = document.querySelector("canvas");
      const place = canvas.getBoundingClientRect();
      const at = { clientX: place.left + 97, clientY: place.top + 40, bubbles: true };
      canvas.dispatchEvent(new MouseEvent("pointermove", at));
      root.dataset.tip = document.querySelector(".tip").textContent;
    """
    tip = data(show(write_run(tmp_path / "run"), then))["tip"]
    assert "0F0" in tip
    assert "forward, stage 0, micro-batch 0" in tip
    assert "rank 0, compute" in tip
    assert "measured starts at 0.000 ms, takes 2.000 ms" in tip
    assert "predicted starts at 0.000 ms, takes 1.000 ms" in tip


@pytest.mark.parametrize("what", ["bare", "diverged", "one step"])
def test_runs_that_lack_something_are_shown_too(show, tmp_path, what):
    options = {
        "bare": {"pp": 1, "predicted": False, "validation_loss": None, "sample": None, "steps": 1},
        "diverged": {"loss": float("nan"), "validation_loss": float("nan")},
        "one step": {"steps": 1},
    }[what]
    document = show(write_run(tmp_path / "run", **options))
    found = data(document)
    assert found["state"] == "ready"
    assert found["boxes"] == found["expected"]
    assert ("One rank: nothing is sent." in document) == (what == "bare")
    assert ("No value is finite." in document) == (what == "diverged")
