"""The page's answers are those of the command line, and its server answers its own page alone."""

import io
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeloom.cli import main
from pipeloom.playground.answers import MOST_ACTIONS, MOST_RANKS, answer, choices, command_of, download
from pipeloom.playground.server import MOST_BODY, App, serve

STATES = [
    {"family": "breadth-first", "pp": 4, "loops": 4, "num_microbatches": 8},
    {"family": "zb-v", "weight": 0.5, "forward": 1.5},
    {"family": "1f1b", "balance": True, "budget": 3.0},
    {"family": "1f1b", "keep": [2, 2, 2, 2], "placement": "linear"},
    {"family": "hybrid", "loops": 2, "unshard": "all", "gather": 0.5, "reduce_grad": True, "reduce": 2.0, "tied": 0.1},
    {"family": "gpipe", "split_backward": "end", "slices": 2, "transfer": 0.25},
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state["family"])
def test_figures_are_those_of_the_command_that_the_page_shows(state, capsys):
    shown = answer(state)
    assert main([*shlex.split(shown["command"])[1:], "--format", "text"]) == 0
    printed = capsys.readouterr().out
    for name, value in shown["lines"]:
        assert f"# {name:<18} {value}\n" in printed
    assert f"# {shown['title']}\n" in printed
    assert download(state, "txt").body in printed
    # What the command line prints can be pasted, its comments included.
    assert answer({"text": printed})["proof"]["actions"] == shown["proof"]["actions"]


def test_timeline_has_a_box_for_each_action_and_json_holds_it():
    shown = json.loads(json.dumps(answer(STATES[0]), allow_nan=False))
    lanes = [lane for rank in shown["timeline"]["panels"][0]["ranks"] for lane in rank["lanes"]]
    assert sum(len(lane["boxes"]) for lane in lanes) == shown["proof"]["actions"] == 4 * 4 * 8 * 2
    assert shown["timeline"]["end"] == 105_000_000
    assert shown["memory"]["by_rank"] == [8, 8, 8, 8]
    assert "acyclic" in [name for name, _ in shown["proof"]["rules"]]


def test_schedule_beside_another_has_the_same_work_for_each_rank_and_memory_in_equal_units(capsys):
    first = answer(STATES[0])
    beside = answer({"family": "1f1b", "beside": first["num_stages"]})
    assert first["same_work"] is None
    assert beside["same_work"].endswith("The 4 stages here are the same model: forward 4, backward 8.")
    cards = [{name: value for name, value, _ in one["headline"]} for one in (first, beside)]
    assert [(card["makespan"], card["peak memory"]) for card in cards] == [("105", "8"), ("132", "4")]
    # The command is of this schedule alone.
    assert beside["command"] == "pipeloom schedule 1f1b --forward 4.0 --backward 8.0"
    assert main([*shlex.split(beside["command"])[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 132
    as_text = answer({"text": download({"family": "1f1b"}, "txt").body, "beside": first["num_stages"]})
    assert as_text["timeline"]["end"] == beside["timeline"]["end"]


def test_memory_limit_of_a_schedule_beside_another_is_of_the_same_memory(capsys, tmp_path):
    state = {"balance": True, "budget": 12.0, "loops": 4, "family": "breadth-first", "offload": True}
    first = answer(state)
    beside = answer({**state, "family": "1f1b", "loops": None, "beside": first["num_stages"]})
    assert first["memory"]["budget"] == beside["memory"]["budget"] == 3
    assert "--budget 3.0 --move 4.0" in beside["command"]
    words = [*shlex.split(first["command"])[2:], "--plot", str(tmp_path / "both.svg"), "--beside", "1f1b"]
    assert main(["schedule", *words]) == 0
    makespan = dict(beside["lines"])["makespan"]
    assert capsys.readouterr().out.count(f"# makespan           {makespan}\n") == 1


def test_broken_rule_is_the_message_of_the_command_line_with_its_place(tmp_path, capsys):
    text = "0F0 0F1 0B0 0B1\n1F0 1B1 1F1 1B0\n"
    (tmp_path / "schedule.txt").write_text(text)
    assert main(["schedule", str(tmp_path / "schedule.txt")]) == 2
    (problem,) = answer({"text": text})["problems"]
    assert problem["text"] in capsys.readouterr().err
    assert problem["rule"] == "forward-before-backward"
    assert (problem["rank"], problem["slot"]) == (1, 1)


@pytest.mark.parametrize(
    ("state", "fields"),
    [
        ({"family": "1f1b", "pp": 0}, ["pp"]),
        ({"family": "1f1b", "pp": "four", "forward": None}, ["pp", "forward"]),
        ({"family": "1f1b", "loops": 2}, ["loops"]),
        ({"family": "1f1b", "forward": -1.0, "num_microbatches": 0}, ["forward", "num_microbatches"]),
        ({"family": "1f1b", "offload": True}, ["offload"]),
        ({"family": "1f1b", "offload": True, "budget": 0.5}, ["budget"]),
        ({"family": "1f1b", "gather": 1.0}, ["gather"]),
        ({"family": "1f1b", "weight": 0.5}, ["weight"]),
        ({"family": "1f1b", "weight": 9.0}, ["weight"]),
        ({"family": "1f1b", "keep": [1]}, ["keep"]),
        ({"family": "1f1b", "receive_buffers": 10**30}, ["receive_buffers"]),
        ({"family": "breadth-first", "pp": 1000, "loops": 1000, "num_microbatches": 1000}, ["num_microbatches"]),
        ({"family": "1f1b", "pp": MOST_RANKS + 1}, ["pp"]),
        ({"family": "1f1b", "update": "at-the-end"}, ["update"]),
        ({"family": "1f2b"}, ["family"]),
        ({"family": "1f1b", "colour": "red"}, [None]),
        ({"family": "1f1b", "beside": 0}, [None]),
        ({"family": "1f1b", "beside": "four"}, [None]),
        ({"family": "1f1b", "pp": 0, "beside": 4}, ["pp"]),
        ({"text": "0F0 what"}, ["text"]),
        ({"text": "0F0, what keeps"}, ["text"]),
        ({"text": "5F0"}, ["text"]),
        ({"text": "1" * 15 + "F0"}, ["text"]),
        ({}, ["family"]),
    ],
)
def test_problems_name_the_input_that_causes_them(state, fields):
    problems = answer(state)["problems"]
    assert [one["field"] for one in problems] == fields
    assert all(one["text"] for one in problems)


def test_files_of_a_schedule():
    state = STATES[0]
    picture = download({"family": "1f1b", "pp": 2, "num_microbatches": 2}, "svg").body
    assert picture.lstrip().startswith("<?xml")
    assert "1f1b" in picture
    csv, text = download(state, "csv").body, download(state, "txt").body
    assert answer({"text": csv})["timeline"]["end"] == answer({"text": text})["timeline"]["end"] == 105_000_000


def test_families_and_defaults_are_offered():
    offered = choices()
    assert {"zb-v", "breadth-first"} <= {one["name"] for one in offered["families"]}
    assert offered["defaults"]["num_microbatches"] == 8
    assert command_of({"family": "zb-v", "num_microbatches": 8}) == "pipeloom schedule zb-v"
    assert MOST_ACTIONS > 8 * 4 * 64 * 3


APP = App(8765, lambda work: work())
PAGE = f"/{APP.token}/"


def ask(path=PAGE, method="GET", body=b"", **headers):
    environ = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "HTTP_HOST": "127.0.0.1:8765",
        "CONTENT_TYPE": "application/json",
        "wsgi.input": io.BytesIO(body),
        **headers,
    }
    found = {}
    body = b"".join(APP(environ, lambda status, headers: found.update(dict(headers), status=int(status[:3]))))
    return found, body


def test_page_is_served_with_a_policy_that_lets_nothing_else_in():
    for name in ("", "page.js", "page.css", "drawing.js", "drawing.css", "colors.css", "choices"):
        found, body = ask(PAGE + name)
        assert (found["status"], len(body) > 100) == (200, True)
        assert found["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
        assert found["Referrer-Policy"] == "no-referrer"
    assert b"<script>" not in ask()[1]  # the policy would not run it
    assert APP.token.encode() not in b"".join(ask(PAGE + name)[1] for name in ("", "page.js", "choices"))


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (403, {"path": "/"}),
        (403, {"path": "/wrong/"}),
        (403, {"path": "/\udcff/"}),
        (403, {"path": PAGE[:-2] + "/"}),
        (403, {"path": "/page.js"}),
        (421, {"HTTP_HOST": "attacker.example:8765"}),
        (421, {"HTTP_HOST": "localhost:8765"}),
        (421, {"HTTP_HOST": ""}),
        (403, {"HTTP_ORIGIN": "http://attacker.example"}),
        (403, {"HTTP_ORIGIN": "null", "path": PAGE + "answer", "method": "POST", "body": b"{}"}),
        (404, {"path": PAGE + "../pyproject.toml"}),
        (404, {"path": PAGE + "/etc/passwd"}),
        (404, {"path": PAGE + "answers.py"}),
        (405, {"method": "POST"}),
        (405, {"method": "DELETE"}),
        (405, {"path": PAGE + "answer"}),
        (405, {"path": PAGE + "answer", "method": "PUT"}),
        (415, {"path": PAGE + "answer", "method": "POST", "CONTENT_TYPE": "text/plain", "body": b"{}"}),
        (400, {"path": PAGE + "answer", "method": "POST", "body": b"[]"}),
        (400, {"path": PAGE + "answer", "method": "POST", "body": b"[" * 100_000}),
        (413, {"path": PAGE + "answer", "method": "POST", "body": b" " * (MOST_BODY + 1)}),
        (422, {"path": PAGE + "svg", "method": "POST", "body": b'{"family": "no"}'}),
        (200, {"path": PAGE + "answer", "method": "POST", "body": b'{"family": "no"}'}),
    ],
)
def test_only_the_page_itself_is_answered(status, request_):
    assert ask(**request_)[0]["status"] == status


def test_ticket_opens_the_page_once():
    app = App(8765, lambda work: work())
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": f"/{app.ticket}/", "HTTP_HOST": "127.0.0.1:8765"}
    first, second = app.respond(environ), app.respond(environ)
    assert (first.status[:3], first.more) == ("303", (("Location", f"/{app.token}/"),))
    assert second.status[:3] == "403"


@pytest.fixture
def playground():
    """A playground in a process of its own: (process, address)."""
    command = [sys.executable, "-c", "import sys; from pipeloom.cli import main; sys.exit(main(sys.argv[1:]))"]
    process = subprocess.Popen(
        [*command, "playground", "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    yield process, line.removeprefix("pipeloom playground: ").strip()
    process.kill()
    process.communicate()


def test_command_serves_this_machine_alone_until_interrupted(playground):
    from urllib.request import Request, urlopen

    process, url = playground
    assert url.startswith("http://127.0.0.1:"), process.stderr.read()
    assert b"Schedule playground" in urlopen(url, timeout=10).read()
    data = json.dumps(STATES[0]).encode()
    reply = urlopen(Request(url + "answer", data, {"Content-Type": "application/json"}), timeout=30)
    assert json.load(reply)["command"] == "pipeloom schedule breadth-first --loops 4"
    port = int(url.split(":")[2].split("/")[0])
    local = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [one for one in local if one.endswith(f":{port:04X}")]
    assert set(listening) == {f"0100007F:{port:04X}"}
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    out, err = process.communicate()
    assert "The playground has ended." in out
    assert "Traceback" not in err


def test_what_takes_too_long_is_ended_with_a_message():
    replies = []

    def opened(app):
        def slow():
            while True:
                time.sleep(0.01)

        def client():
            replies.append(app.compute(slow))
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threading.Thread(target=client, daemon=True).start()

    serve(None, opened, limit_s=0.2)
    assert b"no answer within 0.2 s; choose smaller numbers" in replies[0].body


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--port", "0"], "--port must be at least 1, found 0"),
        (["http://127.0.0.1:1/"], "LINK must contain a schedule behind a '#'"),
    ],
)
def test_wrong_input_of_the_command_is_refused(words, problem, capsys):
    assert main(["playground", *words]) == 2
    assert problem in capsys.readouterr().err
