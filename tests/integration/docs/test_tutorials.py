"""The tutorials: notebooks that run to their end, as for a reader, and have no outputs in the repository."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.integration.docs.pages import ROOT

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))


def test_each_tutorial_is_on_the_page_of_tutorials_and_links_lead_somewhere() -> None:
    page = (ROOT / "docs/tutorials/index.md").read_text()
    assert set(re.findall(r"\]\(([\w-]+\.ipynb)\)", page)) == {path.name for path in TUTORIALS}
    for path in TUTORIALS:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_has_no_outputs_in_the_repository(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_to_its_end(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    if "torch" in path.stem:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=400, kernel_name="python3").execute(cwd=str(tmp_path))
