"""A page in Chromium without a window, driven over pipes by the DevTools protocol: tests, pictures, timings."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "needs chromium or google-chrome on PATH"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LIMIT_S = 20.0
"""Seconds that one command of the protocol, or one wait for the page, may take."""


class Page:
    """The only page of a browser: what is drawn, clicked and read there."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from = to_browser, from_browser
        self._read, self._number, self._session = b"", 0, None
        self._session = self._attach()
        self.call("Runtime.enable")
        # Without a window nothing has the focus.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def _attach(self):
        (target,) = (one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        return self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]

    def call(self, method, **params):
        """Result of a command of the protocol; events are skipped."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (reply := self._message(method)).get("id") != self._number:
            pass
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    def _message(self, waiting_for):
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self._read:
            if not select.select([self._from], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError(f"Chromium gave no answer to {waiting_for} in {LIMIT_S:g} s")
            part = os.read(self._from, 2**20)
            if not part:
                raise RuntimeError("Chromium has ended")
            self._read += part
        message, self._read = self._read.split(b"\0", 1)
        return json.loads(message)

    def run(self, script):
        """Value of JavaScript, awaited."""
        reply = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in reply:
            details = reply["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return reply["result"].get("value")

    def wait(self, condition):
        """Return when JavaScript is true."""
        end = time.monotonic() + LIMIT_S
        while not self._is_true(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"not within {LIMIT_S:g} s: {condition}")
            time.sleep(0.02)

    def _is_true(self, condition):
        try:
            return self.run(condition)
        except RuntimeError as error:
            # While one page replaces another there is nothing to evaluate in.
            if any(text in str(error) for text in ("navigated or closed", "context was destroyed", "Cannot find")):
                return False
            raise

    def look(self, *, width, height, mode="light"):
        """Set the window's size and the color scheme of the system."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": mode}])

    def open(self, url):
        """Load a page; it has set ``data-state`` when this returns."""
        # A new fragment alone loads nothing.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.documentElement?.dataset.state !== undefined")

    def picture(self, *, whole=False):
        """The window, or the whole page, as a PNG file."""
        reply = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(reply["data"])


@contextmanager
def chromium(*flags):
    """A ``Page`` of a browser of its own, which has ended on return.

    Args:
        flags: of the browser, beside those of every test.
    """
    profile = tempfile.mkdtemp(prefix="chromium-")
    # Chromium reads commands from 3 and writes replies to 4: above these, so that no copy overwrites another's source.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for pair in (os.pipe(), os.pipe()) for end in _closed(pair)]
    commands_out, commands_in, replies_out, replies_in = ends
    command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    pipes = [(os.POSIX_SPAWN_DUP2, commands_out, 3), (os.POSIX_SPAWN_DUP2, replies_in, 4)]
    process = os.posix_spawn(BROWSER, command, os.environ, file_actions=[*quiet, *pipes], setpgroup=0)
    os.close(commands_out)
    os.close(replies_in)
    try:
        yield Page(commands_in, replies_out)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(commands_in)
        os.close(replies_out)
        shutil.rmtree(Path(profile), ignore_errors=True)


def _closed(pair):
    """Each end, which is closed when the next one is wanted."""
    for end in pair:
        yield end
        os.close(end)
