"""Parts of pages that are generated, by the definitions that the command line has."""

from importlib.util import find_spec

if find_spec("pipeloom.cli.reference"):
    from generated_after import *  # noqa: F403
else:
    from generated_before import *  # noqa: F403
