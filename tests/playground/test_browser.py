"""The playground's page in a browser without a window, where there is one."""

import signal
import threading
import time

import pytest
from chromium import BROWSER, MISSING, chromium

from pipeloom.cli import main
from pipeloom.playground.answers import answer
from pipeloom.playground.server import serve

pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)
BROKEN = "0F0 0F1 0B0 0B1\\n1F0 1B1 1F1 1B0\\n"
CSV = "0F0,0F1,,0B0,,0B1\\n,1F0,1B0,1F1,1B1,\\n"
IDLE = "sides.length > 0 && sides.every((side) => !side.isBusy)"
SHOWN = """({
  verdict: document.querySelector(".verdict").textContent,
  boxes: Number(document.querySelector("canvas")?.dataset.boxes),
  bubble: document.querySelector("[data-fact=bubble]")?.firstChild.textContent,
})"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a reader sees, step by step; the server has the main thread, the reader another one."""
    found, folder = {}, tmp_path_factory.mktemp("downloads")

    def opened(app):
        def read():
            try:
                with chromium() as page:
                    _read_page(page, app.url, folder, found)
            except Exception as error:
                found["error"] = error
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threading.Thread(target=read, daemon=True).start()

    serve(None, opened)
    if "error" in found:
        raise found["error"]
    return found


def _read_page(page, url, folder, found):
    def do(name, action, look=SHOWN):
        page.run(action)
        page.wait(IDLE)
        found[name] = page.run(look)

    page.look(width=1400, height=900)
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.open(url)
    do("first", "")
    slide = "const one = document.getElementById('A-pp-slider'); one.value = 8"
    do("slider", f"{slide}; one.dispatchEvent(new Event('input', {{ bubbles: true }}))")
    page.run("sides[0].download('txt')")
    do("own", "sides[0].edit()", "[sides[0].text.value, fragment()]")
    do("broken", f"sides[0].take({{ text: '{BROKEN}' }})")
    do("selected", "document.querySelector('.verdict button').click()", "document.getSelection().toString()")
    do("csv", f"sides[0].take({{ text: '{CSV}' }})")
    page.run("document.getElementById('compare').click()")
    do("two", "sides[1].take({ family: 'zb-v' })", "sides.map((side) => [side.end, side.most, side.drawn])")
    page.run("sides[0].take({ family: 'breadth-first', loops: 4 })")
    do(
        "same work",
        "sides[1].take({ family: '1f1b' })",
        "[sides.map((side) => side.answer.headline.map((one) => one[1])), sides[1].work.textContent, fragment()]",
    )
    do("other work", "sides[0].take({ family: '1f1b' })", "[sides[1].answer.command, sides[1].work.textContent]")
    do("csv again", f"sides[0].take({{ text: '{CSV}' }}); sides[1].take({{ family: 'zb-v' }})")
    # The old page is ready, too, as long as the browser has not begun to replace it.
    page.run("window.isOld = true; history.replaceState(null, '', fragment()); location.reload()")
    page.wait(
        f"!window.isOld && document.documentElement?.dataset.state === 'ready' && typeof sides === 'object' && {IDLE}"
    )
    do("reloaded", "", "sides.map((side) => side.answer.command)")
    do(
        "reset",
        "document.getElementById('reset').click()",
        "[sides.length, sides[0].answer.command, root.dataset.state]",
    )
    page.open(f"{url}#family=zb-v&loops=4&num_microbatches=16&colour=red&b.family=none&b.keep=1+1+1+1")
    do("linked", "", "[document.getElementById('shared').textContent, ...sides.map((side) => side.answer.command)]")
    found["file"] = _first_file(folder)


def _first_file(folder):
    end = time.monotonic() + 10
    while not (files := list(folder.glob("*.txt"))):
        assert time.monotonic() < end, list(folder.iterdir())
        time.sleep(0.02)
    return files[0]


def test_page_shows_verdict_timeline_and_bubble_of_the_answer(seen):
    for name, pp in (("first", 4), ("slider", 8)):
        expected = answer({"family": "breadth-first", "loops": 4, "pp": pp})
        assert seen[name]["verdict"].startswith(f"Verified: {expected['proof']['actions']} actions; all ")
        assert seen[name]["boxes"] == expected["timeline"]["boxes"]
        assert seen[name]["bubble"] == dict(one[:2] for one in expected["headline"])["bubble"]


def test_own_schedule_begins_with_the_rows_and_the_downloaded_file_is_the_same(seen, capsys):
    text, fragment = seen["own"]
    assert fragment.startswith("#text=")
    assert seen["file"].name == "breadth-first.txt"
    assert seen["file"].read_text() == text
    assert main(["schedule", str(seen["file"]), "--format", "text"]) == 0
    assert text in capsys.readouterr().out


def test_broken_schedule_shows_its_rule_and_selects_the_place(seen):
    assert seen["broken"]["verdict"].startswith("Illegal: schedule breaks rule 'forward-before-backward' at rank 1")
    assert seen["selected"] == "1B1"
    assert seen["csv"]["verdict"].startswith("Verified: 8 actions")


def test_two_schedules_have_one_axis_and_come_back_with_the_link(seen):
    ends, most, drawn = zip(*seen["two"], strict=True)
    assert drawn == ({"end": max(ends), "most": max(most)},) * 2
    # Both are the same model, whose 2 stages of A are 8 of B.
    zb_v = "pipeloom schedule zb-v --forward 0.25 --backward 0.5"
    assert seen["reloaded"] == ["pipeloom schedule schedule.txt", zb_v]
    assert seen["reset"] == [1, "pipeloom schedule breadth-first --loops 4", "ready"]


def test_schedule_beside_another_is_of_the_same_model(seen):
    (first, beside), note, fragment = seen["same work"]
    assert [first[0], first[-1]] == ["105", "8"]
    assert [beside[0], beside[-1]] == ["132", "4"]
    assert "16 stages of A" in note
    assert "beside" not in fragment
    assert seen["other work"] == ["pipeloom schedule 1f1b", ""]


def test_settings_of_a_link_that_have_no_effect_are_named(seen):
    left_out, *commands = seen["linked"]
    assert left_out.endswith("is left out of the link: loops=4, colour=red, family=none")
    assert commands == [
        "pipeloom schedule zb-v --num-microbatches 16",
        "pipeloom schedule breadth-first --loops 4 --keep 1 1 1 1 --forward 0.5 --backward 1.0",
    ]
