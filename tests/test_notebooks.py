"""The notebooks of examples/ run from top to bottom, and are stored without outputs."""

import json
import logging
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TRAINS = "plan_simulate_train"
"""Takes half a minute; what it calls has tests of its own."""
MOST_LINES = 30
"""Of a cell."""


@pytest.mark.filterwarnings("ignore")  # of Jupyter's libraries
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(one, id=one.stem, marks=[pytest.mark.long] if one.stem == TRAINS else []) for one in NOTEBOOKS],
)
def test_a_notebook_runs_and_draws(notebook, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="pip install pipeloom[notebook]")
    pytest.importorskip("ipykernel", reason="pip install pipeloom[notebook]")
    nbformat = pytest.importorskip("nbformat")
    config = pytest.importorskip("traitlets.config")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    logging.getLogger("traitlets").setLevel(logging.ERROR)
    content = nbformat.read(notebook, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    # Sockets of files: a TCP port that is free when it is chosen may be another process's when the kernel binds it.
    with tempfile.TemporaryDirectory() as short:  # a path of a socket has at most 107 bytes
        sockets = config.Config({"KernelManager": {"transport": "ipc", "ip": f"{short}/kernel"}})
        nbclient.NotebookClient(
            content, config=sockets, timeout=250, kernel_name="python3", resources=resources
        ).execute()
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) >= 3
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    if notebook.stem == TRAINS:
        texts = [output.data["text/plain"] for output in outputs if "data" in output]
        assert any(text.startswith("RunResult(") and "10 steps" in text for text in texts)
        assert any(text.startswith("Equality(equal: ") for text in texts)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_text_and_short_cells_without_outputs(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown"
    for cell in cells:
        assert len(cell["source"]) <= MOST_LINES
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    pairs = pairwise(cells)
    code = sum(one["cell_type"] == other["cell_type"] == "code" for one, other in pairs)
    assert code <= len(cells) // 6, "text between the cells"


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 2
