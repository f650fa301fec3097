"""The environment in which a user starts a command: with bytecode on disk, so that no start compiles modules."""

import os


def user_environment() -> dict[str, str]:
    """This process's variables without the one by which Python keeps no bytecode."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
