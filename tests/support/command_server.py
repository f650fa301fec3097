"""Forks a process for each command that it reads a request for, so that what all of them import is imported once.

``python command_server.py MODULE...`` imports the modules and reads one JSON object a line. ``{"start": {...}}`` is
answered with the number of a new process; ``{"wait": number, "blocks": ...}`` with its exit status, peak bytes and CPU
seconds, or with null if it has not ended and is not to be waited for.
"""

import atexit
import gc
import importlib
import json
import os
import sys
import tempfile
import threading
from contextlib import suppress


def serve():
    """Answer requests until there are no more; returns in each new process, with the words of its command."""
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer = os.fork()
            if answer == 0:
                return _become(**request["start"])
        else:
            pid, status, usage = os.wait4(request["wait"], 0 if request["blocks"] else os.WNOHANG)
            took = usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime
            answer = (os.waitstatus_to_exitcode(status), *took) if pid else None
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
    os._exit(0)


def _become(words, cwd, env, printed):
    os.setsid()
    for number, name in enumerate([os.devnull, *printed]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False) for n, mode in enumerate("rww"))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # the server's; the command looks for its own
    return words


def leave(status):
    """End as Python does, but without taking apart every module that the server has imported: 0.1 s a command."""
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by the command
            stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    for _name in sys.argv[1:]:
        importlib.import_module(_name)
    gc.freeze()  # a collection would copy what a new process shares with this one
    _words = serve()
    sys.argv = ["pipeloom", *_words]
    from pipeloom.cli import main

    _status = 1
    try:
        _status = main(_words)
    except SystemExit as _end:
        _status = _end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    leave(_status)
