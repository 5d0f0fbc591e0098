"""The README's main job, cut short: every file it promises, and scores for BM25, the untrained and the trained model."""

import json

import pytest

from de_jax.tools import quickstart
from de_jax.types import InputError

MEASURES = {"ndcg@10", "mrr@10", "recall@100"}


@pytest.mark.parametrize("num_steps", [4, pytest.param(40, marks=pytest.mark.soak)])
def test_quickstart_writes_its_report_and_pictures_and_runs_again_at_once(tmp_path, monkeypatch, capsys, num_steps):
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path / "cache"))
    run_dir = tmp_path / "quickstart"
    options = [f"--run_dir={run_dir}", "--max_docs=1000", f"--num_steps={num_steps}"]
    quickstart.main(options)
    printed = capsys.readouterr()
    report = json.loads((run_dir / "report.json").read_text())
    assert json.loads(printed.out) == report
    assert all(set(report[name]) == MEASURES for name in ("bm25", "untrained", "trained"))
    if num_steps == 40:
        assert report["trained"]["recall@100"] > 0.1 + report["untrained"]["recall@100"]  # which finds many of 1,000 documents
    assert report["num_docs"] == 1000
    assert {"steps", "seconds", "pairs_per_s"} <= set(report)
    for picture in ("curves.png", "embeddings.png"):
        assert (run_dir / picture).read_bytes().startswith(b"\x89PNG")
    assert f"de-jax search --run_dir={run_dir}" in printed.err
    quickstart.main(options)
    assert json.loads(capsys.readouterr().out)["trained"] == report["trained"]


def test_an_impossible_number_of_documents_is_refused(tmp_path):
    with pytest.raises(InputError, match="--max_docs is 0; it must be at least 1"):
        quickstart.main([f"--run_dir={tmp_path / 'run'}", "--max_docs=0"])
