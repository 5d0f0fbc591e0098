"""Mining with a tiny run and with BM25, against rankings made by hand."""

import json
import shutil

import numpy as np
import pytest
import tiny_run

from de_jax import cli
from de_jax.data.negatives import generations
from de_jax.data.sources.training_set import open_stores, text_hashes
from de_jax.data.text import beir
from de_jax.data.text.passages import PassageStore
from de_jax.files import outputs
from de_jax.mining.mining_run import only_miner
from de_jax.retrieval import encode
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError

QRELS = {"q0": {"d0": 1, "d5": 1, "d7": 0}, "q2": {"d2": 1}, "d3": {"d2": 1}}


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "mined"
    beir.write(folder, tiny_run.DOCS, tiny_run.QUERIES, {"train": QRELS})
    return folder


def read(folder):
    generation = generations.open_generation(folder, max(generations.numbers(folder)))
    return generation, {(line.query_id, line.doc_id): line for line in generations.read(generation).lines()}


def test_a_runs_negatives_are_its_nearest_documents_without_any_positive_of_the_query(printed, trained, dataset_dir, tmp_path):
    report = printed(
        "mine pairs",
        run_dir=trained,
        dataset_dir=dataset_dir,
        negatives_dir=tmp_path,
        num_neg_docs=3,
        last_rank=3,
        num_neg_queries=2,
    )
    generation, lines = read(tmp_path)
    run = load_run(trained)
    stores = open_stores(dataset_dir, run.query.tokenizer, run.doc.tokenizer)
    queries, docs = encode.queries(run, stores[0]), encode.docs(run, stores[1])
    assert set(lines) == {("q0", "d0"), ("q0", "d5"), ("q2", "d2"), ("d3", "d2")}
    for (query_id, doc_id), line in lines.items():
        scores = docs @ queries[stores[0].row_of(query_id)]
        left_out = {query_id, *(other for other, grade in QRELS[query_id].items() if grade)}
        nearest = [stores[1].ids[row] for row in np.argsort(-scores).tolist() if stores[1].ids[row] not in left_out]
        assert sorted(line.neg_doc_ids) == sorted(nearest[:3])
        askers = {other for other, judged in QRELS.items() if judged.get(doc_id)}
        assert set(line.neg_query_ids) == {"q0", "q2", "d3"} - askers
    assert report["checkpoint_step"] == run.step == generation.manifest["checkpoint_step"]
    assert report["neg_docs"]["num_chosen"] == 12
    assert report["seconds"].keys() == {"encode", "encode_queries", "index", "search", "choose", "statistics"}
    assert {name: generation.manifest[name] for name in ("queries", "docs")} == text_hashes(dataset_dir)


@pytest.mark.parametrize("passages", [1, 3])
def test_jobs_that_share_the_documents_mine_what_one_job_mines(printed, trained, dataset_dir, tmp_path, passages):
    runs = [shutil.copytree(trained, tmp_path / name, ignore=shutil.ignore_patterns("embeddings")) for name in ("one", "many")]
    for run_dir in runs:
        lengths = {"max_passages": passages, "max_doc_length": 6} if passages > 1 else {}
        outputs.write_json(run_dir / "run.json", {**outputs.read_json(run_dir / "run.json"), **lengths})
    step = load_run(runs[0]).step
    options = {"dataset_dir": dataset_dir, "step": step, "num_neg_docs": 3, "texts_per_shard": 4}
    options |= {"num_neg_queries": 2} if passages == 1 else {}
    printed("mine pairs", **options, run_dir=runs[0])
    for number in (2, 0, 0, 1):  # one is started again
        assert printed("mine pairs", **options, run_dir=runs[1], shard=f"{number}/3") == {"shard": f"{number}/3"}
    printed("mine pairs", **options, run_dir=runs[1])
    one, many = (folder_of(run_dir / "negatives") for run_dir in runs)
    assert {name: data for name, data in one.items() if name.endswith(".npy")} == {
        name: data for name, data in many.items() if name.endswith(".npy")
    }
    one, many = (sorted(path.name for path in (run_dir / "embeddings" / "mined").glob("[!.]*")) for run_dir in runs)
    assert one == many


def folder_of(negatives_dir):
    generation = generations.open_generation(negatives_dir, max(generations.numbers(negatives_dir)))
    return {path.name: path.read_bytes() for path in generation.folder.iterdir()}


def test_several_jobs_need_one_checkpoint_and_a_run(trained, dataset_dir, tmp_path):
    data = [f"--dataset_dir={dataset_dir}", f"--negatives_dir={tmp_path}", "--shard=0/2"]
    with pytest.raises(InputError, match="--shard needs the number of a checkpoint in --step"):
        cli.call("mine pairs", [*data, f"--run_dir={trained}"])
    with pytest.raises(InputError, match="--shard changes nothing beside --bm25"):
        cli.call("mine pairs", [*data, "--bm25"])
    with pytest.raises(InputError, match="--step changes nothing beside --bm25"):
        cli.call("mine pairs", [*data[:2], "--bm25", "--step=1"])


def test_a_run_of_several_passages_mines_by_the_best_one(printed, trained, dataset_dir, tmp_path):
    run_dir = shutil.copytree(trained, tmp_path / "run")
    outputs.write_json(run_dir / "run.json", {**outputs.read_json(run_dir / "run.json"), "max_passages": 3, "max_doc_length": 6})
    margin = 0.05
    options = {"run_dir": run_dir, "dataset_dir": dataset_dir, "num_neg_docs": 10, "keep_identical_ids": True}
    printed("mine pairs", **options, negatives_dir=tmp_path / "all")
    printed("mine pairs", **options, negatives_dir=tmp_path / "far", margin=margin)
    run = load_run(run_dir)
    query_store, doc_store = open_stores(dataset_dir, run.query.tokenizer, run.doc.tokenizer)
    passages = PassageStore(doc_store, 6, max_passages=3)
    queries, embeddings = encode.queries(run, query_store), encode.docs(run, passages)
    every, far = read(tmp_path / "all")[1], read(tmp_path / "far")[1]
    assert passages.num_texts > doc_store.num_texts
    for (query_id, doc_id), line in far.items():
        best = dict.fromkeys(doc_store.ids, -np.inf)
        for passage_of, embedding in zip(passages.ids, embeddings, strict=True):
            best[passage_of] = max(best[passage_of], float(embedding @ queries[query_store.row_of(query_id)]))
        others = best.keys() - {other for other, grade in QRELS[query_id].items() if grade}
        assert set(every[query_id, doc_id].neg_doc_ids) == others
        assert set(line.neg_doc_ids) == {other for other in others if best[other] <= best[doc_id] - margin}
    assert any(set(far[pair].neg_doc_ids) != set(every[pair].neg_doc_ids) != set() for pair in far)


@pytest.mark.parametrize("ranks", ["bm25", "run_dir"])
def test_a_call_adds_a_generation_unless_the_newest_is_of_the_same(printed, trained, dataset_dir, tmp_path, ranks, capsys):
    options = {"dataset_dir": dataset_dir, "negatives_dir": tmp_path / "out", ranks: True if ranks == "bm25" else trained}
    first = printed("mine pairs", **options, num_neg_docs=2)
    same = ["--bm25"] if ranks == "bm25" else [f"--run_dir={trained}"]
    cli.call("mine pairs", [f"--dataset_dir={dataset_dir}", f"--negatives_dir={tmp_path}/out", *same, "--num_neg_docs=2"])
    out, err = capsys.readouterr()
    assert json.loads(out) == first
    assert f"{tmp_path}/out/000001 was made of the same texts with the same settings; there is nothing to do." in err.splitlines()
    for number, changes in enumerate([{"num_neg_docs": 3}, {"num_neg_docs": 2, "seed": 1}, {"num_neg_docs": 2}], start=2):
        assert printed("mine pairs", **options, **changes)["generation_dir"] == str(tmp_path / "out" / f"00000{number}")
    lines = [list(generations.read(generations.open_generation(tmp_path / "out", number)).lines()) for number in (1, 4)]
    assert lines[0] == lines[1]  # the same seed draws the same
    (tmp_path / "out" / "000004" / "neg_docs.npy").unlink()
    assert printed("mine pairs", **options, num_neg_docs=2)["generation_dir"] == str(tmp_path / "out" / "000005")


def test_bm25_finds_documents_with_the_querys_words(printed, dataset_dir, tmp_path):
    printed("mine pairs", bm25=True, dataset_dir=dataset_dir, negatives_dir=tmp_path)
    _, lines = read(tmp_path)
    texts = {doc_id: f"{title} {text}" for doc_id, title, text in tiny_run.DOCS}
    words = dict(tiny_run.QUERIES)
    for (query_id, _), line in lines.items():
        assert line.neg_doc_ids
        assert not {doc for doc, grade in QRELS[query_id].items() if grade} & set(line.neg_doc_ids)
        assert all(set(words[query_id].split()) & set(texts[doc_id].split()) for doc_id in line.neg_doc_ids)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"bm25": True}, "--negatives_dir is missing"),
        (
            {"bm25": True, "negatives_dir": "out", "num_neg_queries": 1},
            "BM25 does not support num_neg_queries; leave them out, or mine with a run",
        ),
        ({"bm25": True, "negatives_dir": "out", "bm25_language": "xx"}, "BM25 has neither stems nor stop words of 'xx'"),
        ({"bm25": True, "negatives_dir": "out", "margin": 0.1}, "BM25 does not support margin"),
        ({"bm25": True, "negatives_dir": "out", "split": "dev"}, "dev"),
        ({"bm25": True, "negatives_dir": "out", "first_rank": 0}, "--first_rank is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_mined_is_refused_and_nothing_is_written(printed, dataset_dir, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=sentence):
        printed("mine pairs", dataset_dir=dataset_dir, **flags)
    assert list(tmp_path.iterdir()) == []


def test_a_split_without_anything_relevant_is_refused(printed, tmp_path):
    beir.write(tmp_path / "data", tiny_run.DOCS, tiny_run.QUERIES, {"train": {"q0": {"d0": 0}}})
    with pytest.raises(InputError, match="no document is judged relevant, so there is nothing to mine for"):
        printed("mine pairs", bm25=True, dataset_dir=tmp_path / "data", negatives_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_another_miner_holds_is_refused_before_anything_is_read(dataset_dir, tmp_path):
    with only_miner(tmp_path), pytest.raises(InputError, match=r"is mining into .* already; stop it first"):
        cli.call("mine pairs", ["--bm25", f"--dataset_dir={dataset_dir}", f"--negatives_dir={tmp_path}"])
