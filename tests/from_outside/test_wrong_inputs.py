"""Each wrong input gets one message with status 2; nothing is written, and it takes little time and memory."""

import pytest
from commands import run_command
from thinned import thinned
from wrong_inputs import write_named_files, wrong_inputs

CASES = wrong_inputs()
SECONDS = 10.0  # of CPU time, which does not depend on other programs
MOST_BYTES = 1e9


def test_there_are_as_many_cases_as_promised_and_none_twice():
    commands = [command for command, _, _ in CASES]
    assert len(set(commands)) == len(commands) >= 150


@pytest.mark.parametrize(
    ("words", "parts"), thinned([case[1:] for case in CASES], 2), ids=[case[0] or "nothing" for case in CASES]
)
def test_a_wrong_input_gets_one_message_and_writes_nothing(words, parts, tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    write_named_files(words, folder)
    done, written = run_command(*words, folder=folder)
    printed = done.stdout + done.stderr
    assert not done.is_too_long, printed
    assert done.returncode == 2, printed
    assert "Traceback" not in printed
    assert "Errno" not in printed
    assert all(printed.count(word) == 1 for word in words if word.startswith("missing")), printed
    assert [part for part in parts if part not in printed] == [], printed
    assert written == []
    assert done.peak_bytes < MOST_BYTES
    assert done.cpu_s < SECONDS
    assert len(done.stderr.splitlines()) <= 40, printed
    assert "\x1b" not in printed
