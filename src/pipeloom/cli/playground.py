"""``pipeloom playground``: a page on this machine that draws schedules while they change."""

import gc
import webbrowser
from dataclasses import dataclass
from typing import Annotated

from pipeloom.cli.flags import parse_flags
from pipeloom.cli.reference import Command, Place
from pipeloom.errors import ConfigError
from pipeloom.playground.server import ADDRESS, App, serve
from pipeloom.schedule.compiled import expect_much
from pipeloom.trial import Trial, trial_recipe, try_out
from pipeloom.workload.limits import Common, Limits


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom playground``.

    The page is served on 127.0.0.1 alone, under an address with a random token. Ctrl-C ends it.
    """

    link: Annotated[str | None, Place("LINK")] = None
    """A shared link of the page, to open the same schedules."""
    port: Common[Annotated[int | None, Limits(least=1, most=65535)]] = None
    """Port of 127.0.0.1. None: a free one."""
    browser: Common[bool] = True
    """Open the page in a browser."""


COMMAND = Command(name="playground", options=Options, examples={"pipeloom playground": "opens the page in a browser"})


def run(words: list[str]) -> int:
    """Parse the arguments, serve the page until Ctrl-C."""
    options = parse_flags(COMMAND, words)
    fragment = "".join((options.link or "").split("#", 1)[1:])
    if options.link is not None and not fragment:
        problem = f"LINK must contain a schedule behind a '#', as the page's Copy link makes it, found {options.link!r}"
        raise ConfigError([problem], "the command line")
    # Every answer comes at once then, the first one included.
    expect_much()
    try_out(warm := Trial(family="zb-h1", unshard=1, reduce_grad=True), trial_recipe(warm))
    # Collections then skip what has been loaded: each would take longer than an answer.
    gc.freeze()

    def opened(app: App) -> None:
        shared = f"#{fragment}" if fragment else ""
        print(f"pipeloom playground: {app.url}{shared}\nCtrl-C ends it.", flush=True)
        if options.browser:
            # Command lines of browsers are seen by all users of a machine: the ticket works once.
            webbrowser.open(f"http://{ADDRESS}:{app.port}/{app.ticket}/{shared}")

    serve(options.port, opened)
    print("\nThe playground has ended.")
    return 0
