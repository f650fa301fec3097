"""The page in a browser without a window, where there is one."""

import re

import pytest
from chromium import BROWSER, MISSING, chromium
from run_files import without_its_end, write_run

from pipeloom.report import write_report

pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)


@pytest.fixture(scope="module")
def page():
    with chromium() as one:
        yield one


@pytest.fixture
def show(page):
    """The page's document, scripts left out, after they have run, and after ``then``, if given."""

    def open_in_browser(run, then="", mode="light"):
        page.look(width=1280, height=900, mode=mode)
        page.open(write_report(run).as_uri())
        page.run(then)
        return re.sub(r"<script.*?</script>", "", page.run("document.documentElement.outerHTML"), flags=re.S)

    return open_in_browser


def data(document):
    return dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<html[^>]*>", document)[0]))


def test_the_script_runs_and_draws_every_box_table_and_curve(show, tmp_path):
    text = "</script><script>document.documentElement.dataset.broken = 'yes'</script>"
    document = show(write_run(tmp_path / "run", sample=text))
    assert data(document) == {"state": "ready", "boxes": "64", "expected": "64", "mode": "light"}
    assert "0.0 to 56.0 ms" in document
    assert len(re.findall(r"<rect ", document)) == 2 * 3 * 5  # traces, ranks and their total, causes
    assert len(re.findall(r"<tr[ >]", document)) == (2 + 4) + (2 + 3)
    assert len(re.findall(r"<svg ", document)) == 1 + 2 * 2 + 5  # the step, two charts of two ranks, five curves
    assert document.index(">Loss, nats per token<") < document.index(">The step<")
    assert "document.documentElement.dataset.broken = 'yes'&lt;/script&gt;" in document
    assert "NaN" not in document


def test_both_timelines_zoom_together_and_show_their_lanes(show, tmp_path):
    then = """
      const buttons = document.querySelectorAll(".toolbar button");
      const heights = [document.querySelector("canvas").height];
      root.dataset.legend = document.querySelector(".timeline + div").textContent;
      document.getElementById("lanes").click();
      heights.push(document.querySelector("canvas").height);
      root.dataset.whole = document.querySelector(".timeline + div").textContent;
      buttons[0].click();
      root.dataset.grown = heights[1] > heights[0];
      root.dataset.zoomed = document.querySelector(".view").textContent;
      root.dataset.fewer = document.querySelector("canvas").dataset.boxes;
      buttons[2].click();
    """
    found = data(show(write_run(tmp_path / "run"), then))
    assert found["state"] == "ready"
    assert found["grown"] == "true"
    # Of the lanes that are shown.
    assert ("message" in found["legend"], "message" in found["whole"]) == (False, True)
    assert found["legend"].startswith("F: forward")
    assert found["zoomed"] == "14.0 to 42.0 ms"
    assert 0 < int(found["fewer"]) < 64 == int(found["boxes"])


def test_hovering_an_action_shows_both_times(show, tmp_path):
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


def test_a_window_of_1000_pixels_shows_the_whole_legend_of_causes(page, show, tmp_path):
    show(write_run(tmp_path / "run"))
    page.look(width=1000, height=900, mode="light")
    right = "Math.max(...[...document.querySelectorAll('.causes dd')].map((one) => one.getBoundingClientRect().right))"
    assert page.run(right) <= 1000


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
    assert ("There is no communication." in document) == (what == "bare")
    assert ("No value is a finite number." in document) == (what == "diverged")


def test_a_run_without_an_end_is_shown_with_what_it_lacks(show, tmp_path):
    run = without_its_end(write_run(tmp_path / "run"), "trace.json", steps=2)
    document = show(run)
    assert data(document)["state"] == "ready"
    assert "<h2>This run has not finished</h2><p>It is not running any more. 2 of 5 steps are done.</p>" in document
    assert "<b>trace.json: measured timeline and bubble</b>: one of the steps 3 to 5 is traced" in document
    nothing = without_its_end(write_run(tmp_path / "none"), *("trace.json", "predicted_trace.json", "metrics.jsonl"))
    assert data(show(nothing)) == {"state": "ready", "expected": "0", "mode": "light"}


def test_the_timeline_is_moved_and_zoomed_by_keys_and_shows_its_focus(show, tmp_path):
    then = """
      const canvas = document.querySelector("canvas");
      canvas.focus({ focusVisible: true });
      root.dataset.focused = document.activeElement === canvas;
      root.dataset.ring = getComputedStyle(canvas).outlineStyle + " " + getComputedStyle(canvas).outlineWidth;
      const press = (key) => {
        const event = new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true });
        canvas.dispatchEvent(event);
        return document.querySelector(".view").textContent + (event.defaultPrevented ? "" : " not taken");
      };
      const pressed = ["+", "ArrowRight", "End", "ArrowLeft", "Home", "-", "=", "0", "Tab", "toString"];
      root.dataset.keys = pressed.map(press).join("; ");
    """
    document = show(write_run(tmp_path / "run"), then)
    found = data(document)
    assert found["state"] == "ready"
    assert (found["focused"], found["ring"]) == ("true", "solid 3px")
    canvas = re.search(r"<canvas[^>]*>", document)[0]
    assert 'tabindex="0"' in canvas
    assert 'aria-label="timelines of the step, measured in step 3: 56.0 ms; predicted before' in canvas
    assert 'id="keys"' in document
    views = found["keys"].split("; ")
    edges = [tuple(map(float, re.findall(r"[\d.]+", view)[:2])) for view in views]
    zoomed, right, end, left, home, out, _, whole, *others = edges
    assert zoomed == (8.4, 47.6)
    assert right[0] > zoomed[0]
    assert end[1] == 56
    assert left[1] < end[1]
    assert home[0] == 0
    assert out[1] - out[0] > home[1] - home[0]
    assert whole == (0, 56)
    assert others == [whole, whole]
    assert [view.endswith("not taken") for view in views] == [False] * 8 + [True] * 2


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_page_follows_the_colors_of_the_system(show, tmp_path, mode):
    then = """
      const brightness = (color) => {
        const parts = color.match(/[0-9.]+/g).slice(0, 3).map(Number);
        return Math.round(parts[0] * 0.3 + parts[1] * 0.59 + parts[2] * 0.11);
      };
      const canvas = document.querySelector("canvas");
      const pen = canvas.getContext("2d"); // looks at the predicted step, where it has ended
      const at = (length) => Math.round(length * canvas.width / canvas.clientWidth);
      const pixel = () => "rgb(" + pen.getImageData(canvas.width - at(20), at(153), 1, 1).data.join(" ") + ")";
      const of = (where, what) => brightness(getComputedStyle(document.querySelector(where))[what]);
      root.dataset.paper = of("body", "backgroundColor");
      root.dataset.ink = of("body", "color");
      root.dataset.row = brightness(pixel());
      root.dataset.curve = of("svg path.line", "stroke");
      root.dataset.label = of("svg text", "fill");
      root.dataset.total = of("svg rect.cause", "fill");
      window.dispatchEvent(new Event("beforeprint"));
      root.dataset.printed = brightness(pixel());
      window.dispatchEvent(new Event("afterprint"));
      root.dataset.after = brightness(pixel());
    """
    found = data(show(write_run(tmp_path / "run"), then, mode))
    paper, ink, row, curve, label, total = (
        int(found[key]) for key in ("paper", "ink", "row", "curve", "label", "total")
    )
    assert (paper > 240) == (row > 200) == (mode == "light")
    assert (paper < 40) == (row < 60) == (mode == "dark")
    assert all(abs(color - paper) > least for color, least in ((ink, 150), (curve, 90), (label, 90), (total, 40)))
    assert int(found["printed"]) > 200
    assert found["after"] == found["row"]
