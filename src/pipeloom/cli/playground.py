"""``pipeloom playground``: a page on this machine that draws schedules while they change."""

import webbrowser
from dataclasses import dataclass
from typing import Annotated

import tyro

from pipeloom.cli.flags import parse_flags
from pipeloom.errors import ConfigError
from pipeloom.playground.server import ADDRESS, App, serve
from pipeloom.schedule.compiled import expect_much
from pipeloom.trial import Trial, trial_recipe, try_out


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draw schedules in the browser, with bubble and memory, while their sizes and costs change.

    The page is served on 127.0.0.1 alone, under an address with a random token. Ctrl-C ends it.
    """

    link: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="LINK")] = None
    """A link that the page made to share what it shows; opens the same."""
    port: int | None = None
    """Port of 127.0.0.1. None: a free one."""
    browser: bool = True
    """Open the page in a browser; --no-browser prints its address only."""


def run(words: list[str]) -> int:
    """Parse the arguments, serve the page until Ctrl-C."""
    options = parse_flags(Options, words, "playground", Options.__doc__ or "")
    if options.port is not None and not 0 < options.port < 2**16:
        raise ConfigError([f"--port must be from 1 to 65535, found {options.port}"], "the command line")
    fragment = (options.link or "").partition("#")[2]
    if options.link is not None and not fragment:
        problem = f"LINK must contain a schedule behind a '#', as the page's Copy link makes it, found {options.link!r}"
        raise ConfigError([problem], "the command line")
    # Every answer comes at once then, the first one included.
    expect_much()
    try_out(warm := Trial(family="zb-h1", unshard=1, reduce_grad=True), trial_recipe(warm))

    def opened(app: App) -> None:
        shared = f"#{fragment}" if fragment else ""
        print(f"pipeloom playground: {app.url}{shared}\nCtrl-C ends it.", flush=True)
        if options.browser:
            # Command lines of browsers are seen by all users of a machine: the ticket works once.
            webbrowser.open(f"http://{ADDRESS}:{app.port}/{app.ticket}/{shared}")

    serve(options.port, opened)
    print("\nThe playground has ended.")
    return 0
