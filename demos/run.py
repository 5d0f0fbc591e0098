"""Runs notebooks from their first cell to their last and stores their outputs, with the time they took in the metadata.

python demos/run.py train_and_search your_csv
"""

import argparse
import platform
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat

DEMOS = Path(__file__).parent


def run(name: str) -> float:
    """Stores the outputs of a notebook, without lines of progress; seconds."""
    path = DEMOS / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": folder}}).execute()
    seconds = time.monotonic() - start
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["de_jax"] = {"seconds": round(seconds), "python": platform.python_version(), "machine": "2 CPU cores"}
    nbformat.write(notebook, path)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    for name in parser.parse_args().names:
        print(f"{name}: {run(name):.0f} s")


if __name__ == "__main__":
    main()
