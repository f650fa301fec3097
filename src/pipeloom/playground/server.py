"""The page's server: for one browser on this machine, which has to show a token.

Requests are read by threads of waitress, which limits their number, size and time. What they want is computed in the
main thread, one after the other, where a timer can end it (``Stop``).
"""

import hmac
import json
import logging
import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from typing import Any

from pydantic_core import to_json

from pipeloom.errors import HostError, PipeloomError, UserError
from pipeloom.playground.answers import Download, answer, choices, download, refusal
from pipeloom.system.stopping import Stop

ADDRESS = "127.0.0.1"
"""The only address: nothing beyond this machine can connect."""
MOST_BODY = 2**20
"""Bytes of a request."""
MOST_WAITING = 16
"""Requests that wait to be computed."""
MOST_S = 10.0
"""Seconds that one request may compute."""
_HTML, _CSS, _JS = "text/html; charset=utf-8", "text/css; charset=utf-8", "text/javascript; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_FILES = {
    "": ("pipeloom.playground", "page.html", _HTML),
    "page.css": ("pipeloom.playground", "page.css", _CSS),
    "page.js": ("pipeloom.playground", "page.js", _JS),
    "colors.css": ("pipeloom.report", "colors.css", _CSS),
    "drawing.css": ("pipeloom.report", "drawing.css", _CSS),
    "drawing.js": ("pipeloom.report", "drawing.js", _JS),
}
"""All that is served: no path of a request becomes a path of a file."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
]
_STRANGER = (
    "This page opens with its token alone. Open the address that `pipeloom playground` prints; to see what somebody "
    "shared with you, run `pipeloom playground 'LINK'`.\n"
)


@dataclass(frozen=True)
class Response:
    """What a request gets.

    Attributes:
        status: as HTTP has it, with its words.
        media_type: of the body.
        body: bytes.
        more: further headers.
    """

    status: str
    media_type: str
    body: bytes
    more: tuple[tuple[str, str], ...] = ()


def _said(status: str, text: str) -> Response:
    return Response(status, _TEXT, text.encode())


def _as_json(tree: Any, status: str = "200 OK") -> Response:
    # A third of the time of the standard library, for answers of 100 KB that a slider waits for.
    return Response(status, "application/json", to_json(tree, inf_nan_mode="null"))


Work = Callable[[], Response]


@dataclass
class App:
    """The page and its answers as a WSGI application.

    Attributes:
        port: at which it is reached.
        compute: runs what takes time; returns its response.
        token: what a request has to show.
        ticket: takes a browser to the page once, so that the token is in no command line of a browser.
    """

    port: int
    compute: Callable[[Work], Response]
    token: str = field(default_factory=partial(secrets.token_urlsafe, 24))
    ticket: str | None = field(default_factory=partial(secrets.token_urlsafe, 24))

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.port}/{self.token}/"

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        response = self.respond(environ)
        headers = [("Content-Type", response.media_type), ("Content-Length", str(len(response.body)))]
        start_response(response.status, [*headers, *_HEADERS, *response.more])
        return [response.body] if environ["REQUEST_METHOD"] != "HEAD" else []

    def respond(self, environ: dict[str, Any]) -> Response:
        """The response to a request."""
        own = f"{ADDRESS}:{self.port}"
        # A name that somebody else's DNS points at this machine is in the Host of the browser's request.
        if environ.get("HTTP_HOST") != own:
            return _said("421 Misdirected Request", f"expected the host {own}\n")
        if environ.get("HTTP_ORIGIN", f"http://{own}") != f"http://{own}":
            return _said("403 Forbidden", "requests of other pages are refused\n")
        shown, *rest = environ.get("PATH_INFO", "").removeprefix("/").split("/", 1)
        name = "".join(rest)
        if self.ticket is not None and name == "" and _is_same(shown, self.ticket):
            self.ticket = None
            return Response("303 See Other", _TEXT, b"", (("Location", f"/{self.token}/"),))
        if not _is_same(shown, self.token):
            return _said("403 Forbidden", _STRANGER)
        return self._post(name, environ) if name in _POSTS else self._get(name, environ)

    def _get(self, name: str, environ: dict[str, Any]) -> Response:
        if name not in _FILES and name != "choices":
            return _said("404 Not Found", "there is no such page\n")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return Response("405 Method Not Allowed", _TEXT, b"this is read only\n", (("Allow", "GET, HEAD"),))
        if name == "choices":
            return self.compute(lambda: _as_json(choices()))
        return Response("200 OK", _FILES[name][2], _file(name))

    def _post(self, name: str, environ: dict[str, Any]) -> Response:
        if environ["REQUEST_METHOD"] != "POST":
            return Response("405 Method Not Allowed", _TEXT, b"this takes a POST\n", (("Allow", "POST"),))
        # Another page can send forms and plain text here, but JSON only if it is permitted to, which it is not.
        if environ.get("CONTENT_TYPE", "").split(";")[0].strip() != "application/json":
            return _said("415 Unsupported Media Type", "expected application/json\n")
        body = environ["wsgi.input"].read(MOST_BODY + 1)
        if len(body) > MOST_BODY:
            return _said("413 Content Too Large", f"expected at most {MOST_BODY:,} bytes\n")
        try:
            state = json.loads(body)
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            return _said("400 Bad Request", "expected a JSON object\n")
        return self.compute(partial(_POSTS[name], state))


def _is_same(shown: str, secret: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), secret.encode())


@cache
def _file(name: str) -> bytes:
    package, file, _ = _FILES[name]
    return (files(package) / file).read_bytes()


def _answered(state: dict[str, Any], *, with_curves: bool = False) -> Response:
    begin = time.perf_counter()
    tree = answer(state, with_curves=with_curves)
    tree["computed_ms"] = round((time.perf_counter() - begin) * 1e3, 2)
    return _as_json(tree)


def _downloaded(form: str, state: dict[str, Any]) -> Response:
    try:
        found: Download = download(state, form)
    except PipeloomError as error:
        return _as_json(refusal(error), "422 Unprocessable Content")
    name = f'attachment; filename="{"".join(one for one in found.name if one.isalnum() or one in "-_.")}"'
    media_type = f"{found.media_type}; charset=utf-8"
    return Response("200 OK", media_type, found.body.encode(), (("Content-Disposition", name),))


_POSTS: dict[str, Callable[[dict[str, Any]], Response]] = {
    "answer": _answered,
    "curves": partial(_answered, with_curves=True),
    **{form: partial(_downloaded, form) for form in ("svg", "txt", "csv")},
}


class _Job:
    """Work that a thread of the server waits for."""

    def __init__(self, work: Work) -> None:
        self.work, self.done = work, threading.Event()
        self.response = _said("503 Service Unavailable", "the playground is ending\n")

    def run(self, limit_s: float) -> bool:
        """Do it in the main thread; whether Ctrl-C ended it."""
        stop = Stop(time.monotonic() + limit_s)
        try:
            stop.run(self._work)
        except Exception:  # one request must not end the server; its traceback goes to the terminal
            traceback.print_exc()
            self.response = _problem("500 Internal Server Error", "this is a defect of pipeloom; the terminal has more")
        if stop.reason == "time":
            self.response = _problem(
                "503 Service Unavailable", f"no answer within {limit_s:g} s; choose smaller numbers"
            )
        self.done.set()
        return stop.reason == "interrupt"

    def _work(self) -> None:
        self.response = self.work()


def _problem(status: str, text: str) -> Response:
    return _as_json({"problems": [{"field": None, "text": text}]}, status)


def _next_job(jobs: queue.Queue[_Job]) -> _Job:
    while True:
        # With a limit: a signal that arrives just before a lock blocks interrupts no wait without one.
        with suppress(queue.Empty):
            return jobs.get(timeout=0.5)


def serve(port: int | None, opened: Callable[[App], None], limit_s: float = MOST_S) -> None:
    """Serve the page until Ctrl-C.

    Args:
        port: at which; ``None`` for one that is free.
        opened: called when the page can be reached.
        limit_s: seconds that one request may compute.

    Raises:
        UserError: the server's package is missing.
        HostError: the port is taken.
    """
    try:
        from waitress.server import create_server
    except ImportError as error:
        raise UserError("the playground needs the package waitress: pip install 'pipeloom[playground]'") from error
    jobs: queue.Queue[_Job] = queue.Queue(MOST_WAITING)

    def compute(work: Work) -> Response:
        job = _Job(work)
        try:
            jobs.put_nowait(job)
        except queue.Full:
            return _problem("503 Service Unavailable", "too many requests wait; try again")
        job.done.wait()
        return job.response

    logging.getLogger("waitress").setLevel(logging.ERROR)  # requests that wait for their turn are no news
    app = App(port or 0, compute)
    limits = {
        "threads": 4,
        "connection_limit": 32,
        "channel_timeout": 30,
        "max_request_header_size": 16_384,
        "max_request_body_size": MOST_BODY,
    }
    try:
        server: Any = create_server(app, host=ADDRESS, port=port or 0, ident=None, **limits)
    except OSError as error:
        raise HostError(f"port {port} of {ADDRESS} cannot be used: {error.strerror}; choose another --port") from error
    app.port = int(server.effective_port)
    threading.Thread(target=server.run, name="playground", daemon=True).start()
    opened(app)
    try:
        while not _next_job(jobs).run(limit_s):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        server.trigger.pull_trigger(server.close)  # in the thread that uses its sockets
