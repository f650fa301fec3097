"""What ``torch.compile`` needs on this machine: a compiler and Python's header files."""

import os
import shutil
import sysconfig
from pathlib import Path

_COMPILERS = {"C": ("gcc", "clang", "cc"), "C++": ("g++", "clang++")}
"""Names that PyTorch searches."""
_VARIABLES = {"C": "CC", "C++": "CXX"}


def toolchain_problems(device: str) -> list[str]:
    """Why ``torch.compile`` cannot generate code here, one sentence for each reason; empty if it can.

    On CPUs it generates C++; on CUDA its launchers of kernels are C.
    """
    language = "C" if device == "cuda" else "C++"
    variable, names = _VARIABLES[language], _COMPILERS[language]
    problems: list[str] = []
    # The environment variable first, as in PyTorch.
    if not any(name and shutil.which(name) for name in (os.environ.get(variable), *names)):
        problems.append(
            f"training.compile needs a {language} compiler, found none of {variable}, {', '.join(names)}; "
            "install one, or leave training.compile out"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        problems.append(
            f"training.compile needs Python's header files, found no Python.h in {headers}; "
            "install them (python3-dev), or leave training.compile out"
        )
    return problems
