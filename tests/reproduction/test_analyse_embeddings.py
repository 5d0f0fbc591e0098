import json

import pytest
from tiny_run import DOCS, QUERIES

from de_jax import arguments
from de_jax.data.text import beir
from de_jax.types import InputError
from reproduction import verbs


@pytest.fixture(scope="module")
def judged_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged") / "tiny"
    beir.write(
        folder,
        DOCS,
        QUERIES,
        {"test": {"q0": {"d0": 1}, "d3": {"d6": 1}, "q2": {"d2": 1}}, "few": {"q0": {"d0": 1}}, "gone": {"q0": {"d77": 1}}},
    )
    return folder


@pytest.mark.soak
def test_a_report_of_all_documents_and_one_of_a_sample(trained, judged_dir, tmp_path, printed):
    whole = printed("analyse embeddings", run_dir=trained, dataset_dir=judged_dir)
    out_dir = trained / "analysis/tiny-test-7"
    assert whole["report"] == str(out_dir / "report.html")
    assert whole["num_docs"] == 10
    kept = json.loads((out_dir / "analysis.json").read_text())
    assert kept == {name: value for name, value in whole.items() if name != "report"}
    sample = printed("analyse embeddings", run_dir=trained, dataset_dir=judged_dir, max_docs=6, out_dir=tmp_path / "sample")
    assert sample["num_docs"] == 6
    assert sample["num_judged_docs"] == 3
    assert "a sample of 6" in (tmp_path / "sample/report.html").read_text()
    assert sample["cosine_of_relevant_document"] == whole["cosine_of_relevant_document"]


def test_splits_and_samples_that_are_too_small_are_refused(trained, judged_dir, tmp_path):
    flags = ["--run_dir", str(trained), "--dataset_dir", str(judged_dir), "--out_dir", str(tmp_path / "out")]
    with pytest.raises(InputError, match="1 queries have a relevant document"):
        verbs.call("analyse embeddings", [*flags, "--split", "few"])
    with pytest.raises(InputError, match="more than max_docs = 2"):
        verbs.call("analyse embeddings", [*flags, "--max_docs", "2"])
    for sample in ([], ["--max_docs", "5"]):
        with pytest.raises(InputError, match="d77"):
            verbs.call("analyse embeddings", [*flags, "--split", "gone", *sample])
    assert not (tmp_path / "out").exists()


def test_only_a_former_analysis_is_replaced(trained, judged_dir, tmp_path, printed, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with monkeypatch.context() as patch:
        patch.setattr(arguments, "open_model", None)  # refused before a model loads
        for out_dir in (tmp_path / "mine", trained, trained.parent):
            before = sorted(out_dir.rglob("*"))
            with pytest.raises(InputError, match=r"exists already and holds .*, which is not part of a former analysis"):
                printed("analyse embeddings", run_dir=trained, dataset_dir=judged_dir, out_dir=out_dir)
            assert sorted(out_dir.rglob("*")) == before
