"""Negatives that were made for one checkpoint of a tiny run, looked at from two."""

import json
import shutil

import numpy as np
import pytest
import tiny_run

from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources.training_set import open_stores, text_hashes
from de_jax.data.text import beir
from de_jax.retrieval import encode
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError
from reproduction import negative_analysis

QRELS = {"q0": {"d0": 1, "d5": 1}, "q2": {"d2": 1}, "d3": {"d6": 1}}
DEPTH = 3


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "mined"
    beir.write(folder, tiny_run.DOCS, tiny_run.QUERIES, {"train": QRELS})
    return folder


@pytest.fixture(scope="module")
def mined_dirs(tmp_path_factory, trained, dataset_dir):
    """The documents nearest to each query by the newest checkpoint, and those farthest from it."""
    run = load_run(trained)
    stores = open_stores(dataset_dir, run.query.tokenizer, run.doc.tokenizer)
    queries, docs = encode.queries(run, stores[0]), encode.docs(run, stores[1])
    found = {"near": [], "far": []}
    for query_id, judged in QRELS.items():
        scores = docs @ queries[stores[0].row_of(query_id)]
        ranking = [doc_id for row in np.argsort(-scores).tolist() if (doc_id := stores[1].ids[row]) not in {*judged, query_id}]
        for doc_id in judged:
            found["near"].append(Mined(query_id, doc_id, ranking[:DEPTH], []))
            found["far"].append(Mined(query_id, doc_id, ranking[DEPTH:], []))
    folder = tmp_path_factory.mktemp("negatives")
    facts = {**text_hashes(dataset_dir), "seconds": {"encode": 2.0, "index": 0.1, "search": 0.1, "choose": 0.1}}
    for name, lines in found.items():
        generations.write_lines(folder / name, 1, lines, facts)
    return folder


@pytest.mark.soak
def test_negatives_of_a_checkpoint_are_in_its_top_and_cost_more(printed, trained, dataset_dir, mined_dirs, tmp_path):
    report = printed(
        "analyse negatives",
        run_dir=trained,
        steps=[7, 3],
        dataset_dir=dataset_dir,
        negatives=[f"near={mined_dirs / 'near'}", f"far={mined_dirs / 'far' / '000001'}"],
        groups=["towers=shared/encoder/.*"],
        temperature=0.1,
        depth=DEPTH,
        out_dir=tmp_path / "out",
    )
    assert [one["step"] for one in report["checkpoints"]] == [3, 7]
    last = report["checkpoints"][-1]
    assert last.keys() == {"step", "in_batch", "random", "near", "far"}
    assert (last["near"]["overlap"], last["far"]["overlap"]) == (1.0, 0.0)
    assert last["near"]["mean_rank"] == 2.0
    assert last["near"]["loss"] > last["far"]["loss"]
    assert last["near"]["margin"]["mean"] < last["far"]["margin"]["mean"]
    norms = last["near"]["grad_norm"]
    assert all(norms[name].keys() == {"all", "towers"} for name in ("per_pair", "median", "of_mean"))
    assert 0 < norms["of_mean"]["towers"] < norms["of_mean"]["all"] <= norms["per_pair"]["all"]
    assert report["num_pairs"] == report["drawn_from"] == 4
    assert report["report"] == str(tmp_path / "out/report.html")
    kept = json.loads((tmp_path / "out/analysis.json").read_text())
    assert kept == {name: value for name, value in report.items() if name != "report"}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"negatives": ["absent"]}, "--negatives has 'absent'; give each name once, as name=value"),
        ({"negatives": ["a=absent"]}, "absent does not exist; make one with de-jax mine pairs"),
        ({"groups": ["a=nothing/.*"]}, "gradient norm pattern 'nothing/"),
        ({"temperature": 0.0}, "--temperature is 0.0; it must be more than 0"),
        ({"steps": ["4"]}, "does not have checkpoint '4'"),
        ({"split": "dev"}, "dev"),
    ],
)
def test_what_cannot_be_analysed_is_refused_and_nothing_is_written(printed, trained, dataset_dir, tmp_path, flags, sentence):
    with pytest.raises(InputError, match=sentence):
        printed("analyse negatives", run_dir=trained, dataset_dir=dataset_dir, out_dir=tmp_path / "out", **flags)
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
def test_a_checkpoint_that_the_trainer_removes_meanwhile_is_passed_over_for_the_newest(
    printed, trained, dataset_dir, tmp_path, monkeypatch
):
    run_dir, draw = tmp_path / "run", negative_analysis.sample
    shutil.copytree(trained, run_dir)
    shutil.move(run_dir / "checkpoints" / "7", tmp_path / "7")

    def removed_meanwhile(*args, **options):
        shutil.move(tmp_path / "7", run_dir / "checkpoints" / "7")
        shutil.rmtree(run_dir / "checkpoints" / "3" / "params")  # half of it is gone
        return draw(*args, **options)

    monkeypatch.setattr(negative_analysis, "sample", removed_meanwhile)
    options = {"run_dir": run_dir, "dataset_dir": dataset_dir, "temperature": 0.1, "num_pairs": 1}
    report = printed("analyse negatives", **options, out_dir=tmp_path / "out")
    assert [one["step"] for one in report["checkpoints"]] == [7]


def test_only_a_former_analysis_is_replaced(trained, dataset_dir, tmp_path, printed, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with monkeypatch.context() as patch:
        patch.setattr("reproduction.analyse.load_run", None)  # refused before a model loads
        for out_dir in (tmp_path / "mine", trained, trained.parent):
            before = sorted(out_dir.rglob("*"))
            with pytest.raises(InputError, match=r"exists already and holds .*, which is not part of a former analysis"):
                printed("analyse negatives", run_dir=trained, dataset_dir=dataset_dir, out_dir=out_dir)
            assert sorted(out_dir.rglob("*")) == before
