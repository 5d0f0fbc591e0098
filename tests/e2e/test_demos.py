"""The notebooks run from their first cell to their last, with few documents and updates."""

from pathlib import Path

import pytest

DEMOS = Path(__file__).parents[2] / "demos"


@pytest.mark.soak
@pytest.mark.parametrize("path", sorted(DEMOS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_cell_runs(path, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path / "cache"))
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source += "\nSTEPS, MORE = 6, ['--max_docs=1000']"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
