"""The README's main job, cut short: every file it promises, and scores for BM25, the untrained and the trained model."""

import json
from pathlib import Path

import pytest

from de_jax import cli
from de_jax.tools import quickstart
from de_jax.types import InputError
from reproduction.result_check import check

ROOT = Path(__file__).parents[2]
MEASURES = {"ndcg@10", "mrr@10", "recall@100"}


SMALL = """include "recipes/quickstart.gin"
make_mesh.data = 1
PairsOptions.batch_size = 32
T5Config.model_dim = 16
T5Config.mlp_dim = 32
"""


@pytest.mark.soak
@pytest.mark.parametrize("is_small", [True, False], ids=["small", "as it is"])
def test_quickstart_writes_its_report_and_pictures_and_runs_again_at_once(tmp_path, monkeypatch, capsys, is_small):
    """As it is with few documents, `tests/wheel.sh` runs it too."""
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path / "cache"))
    run_dir = tmp_path / "quickstart"
    num_docs, num_steps = (300, 4) if is_small else (1000, 40)
    options = [f"--run_dir={run_dir}", f"--max_docs={num_docs}", f"--num_steps={num_steps}"]
    if is_small:
        (tmp_path / "small.gin").write_text(SMALL)
        options.append(f"--gin_file={tmp_path / 'small.gin'}")
    cli.call("quickstart", options)
    printed = capsys.readouterr()
    report = json.loads((run_dir / "report.json").read_text())
    assert json.loads(printed.out) == report
    systems = ("bm25", "untrained", "trained", "fusion", "weighted_fusion")
    assert all(set(report[name]) == MEASURES for name in systems)
    assert [line.split()[0] for line in printed.err.partition("\ntest ")[2].splitlines()[1:6]] == list(systems)
    assert report["model_weight"] in quickstart.WEIGHTS
    if not is_small:
        assert report["trained"]["recall@100"] > 0.1 + report["untrained"]["recall@100"]  # which finds many of 1,000 documents
    assert report["num_docs"] == num_docs
    assert {"steps", "seconds", "pairs_per_s"} <= set(report)
    for picture in ("curves.png", "embeddings.png"):
        assert (run_dir / picture).read_bytes().startswith(b"\x89PNG")
    assert f"de-jax search --run_dir={run_dir}" in printed.err
    cli.call("quickstart", options)
    assert json.loads(capsys.readouterr().out)["trained"] == report["trained"]
    if is_small:
        with pytest.raises(InputError, match=r"was begun with tokenizers/.*; use .* another run_dir"):
            cli.call("quickstart", [*options, "--max_docs=310", "--num_steps=8"])


@pytest.mark.soak
def test_the_one_command_of_the_readme_scores_as_recorded(tmp_path, monkeypatch):
    """Within the tolerances of results/first_steps.yaml; the scores of another version of Python are not recorded."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path / "cache"))
    report = check("quickstart", tmp_path)
    assert {score["score"] for score in report["scores"]} >= {"trained, best by dev, nDCG@10"}
    assert report["within"], report["scores"]
    found = json.loads((tmp_path / "runs" / "quickstart" / "report.json").read_text())
    assert found["weighted_fusion"]["ndcg@10"] > found["bm25"]["ndcg@10"]  # as README says


def test_an_impossible_number_of_documents_is_refused(tmp_path):
    with pytest.raises(InputError, match="--max_docs is 0; it must be at least 1"):
        cli.call("quickstart", [f"--run_dir={tmp_path / 'run'}", "--max_docs=0"])
