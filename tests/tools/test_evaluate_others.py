"""Kinds of `evaluate` on a tiny run, and on real data where it is there."""

import json
from pathlib import Path

import numpy as np
import pytest
from real_data import SHARED_DATA
from tiny_run import DOCS, QRELS, QUERIES

from de_jax import cli
from de_jax.data.text import beir
from de_jax.evaluation import metrics
from de_jax.retrieval import encode
from de_jax.types import InputError

ALL = ["evaluate trec", "evaluate msmarco", "evaluate sentences", "evaluate openqa"]
needs_real_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the real data sets are not here")


@pytest.fixture(scope="module")
def trec(tmp_path_factory):
    """The tiny data set as tsv and TREC files, with grades."""
    folder = tmp_path_factory.mktemp("trec")
    (folder / "collection.tsv").write_text("".join(f"{doc_id}\t{title} {text}\n" for doc_id, title, text in DOCS))
    (folder / "topics.txt").write_text("".join(f"{query_id}\t{text}\n" for query_id, text in QUERIES))
    judged = [(query_id, doc_id, grade) for query_id, docs in QRELS["test"].items() for doc_id, grade in docs.items()]
    (folder / "qrels.txt").write_text("".join(f"{query_id} 0 {doc_id} {grade}\n" for query_id, doc_id, grade in judged))
    return {"corpus": folder / "collection.tsv", "topics": folder / "topics.txt", "qrels": folder / "qrels.txt"}


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """The tiny data set with answers to two of its queries, one of which stands in a title only."""
    folder = tmp_path_factory.mktemp("openqa") / "tiny"
    docs = [("p0", "Fox", "the red animal"), ("p1", "Sea", "deep and blue"), ("p2", "Den", "where the Wolf lives")]
    beir.write(folder, docs, QUERIES, {})
    answers = [{"_id": "q0", "answers": ["fox", "red  ANIMAL"]}, {"_id": "d3", "answers": ["sea"]}]
    (folder / "answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    return folder


def rankings(report):
    return {path.stem: metrics.read_trec_run(path) for path in Path(report["evaluation_dir"]).glob("*.trec")}


def test_trec_files_score_as_the_beir_folder_of_the_same_texts(trained, dataset_dir, trec, printed):
    report = printed("evaluate trec", run_dir=trained, measures=["nDCG@10", "RR@10"], **trec)
    expected = printed(
        "evaluate beir", run_dir=trained, dataset_dir=dataset_dir, measures=["nDCG@10", "RR@10"], keep_identical_ids=True
    )
    assert {system: report[system] for system in ("dense", "bm25", "fusion")} == {
        system: expected[system] for system in ("dense", "bm25", "fusion")
    }
    assert (report["num_docs"], report["num_queries"], report["settings"]["identical_ids"]) == (10, 2, "kept")


def test_a_run_file_scores_as_the_model_that_wrote_it(trained, trec, printed):
    report = printed("evaluate trec", run_dir=trained, **trec)
    run_file = Path(report["evaluation_dir"]) / "dense.trec"
    again = printed("evaluate trec", run_file=run_file, qrels=trec["qrels"])
    assert {name: again[name] for name in report["dense"]} == report["dense"]
    assert (again["num_queries"], again["num_queries_found"]) == (2, 2)
    assert again["hole@10"] == pytest.approx((8 / 10 + 9 / 10) / 2)


def test_low_grades_are_not_relevant_to_mrr_and_recall_when_asked(tmp_path, trec, printed):
    lines = [f"q0 Q0 {doc_id} {rank} {-rank} x" for rank, doc_id in enumerate(("d0", "d1", "d5"), start=1)]
    (tmp_path / "run.trec").write_text("\n".join(lines) + "\n")
    flags = {"run_file": tmp_path / "run.trec", "qrels": trec["qrels"], "measures": ["RR@10", "R@2", "nDCG@10"]}
    lenient, strict = printed("evaluate trec", **flags), printed("evaluate trec", min_relevance=2, **flags)
    # d0 has grade 1, d5 grade 2; the second query has no results and counts 0.
    assert (lenient["mrr@10"], lenient["recall@2"]) == (0.5, 0.25)
    assert (strict["mrr(rel=2)@10"], strict["recall(rel=2)@2"]) == (pytest.approx(1 / 6, abs=1e-5), 0.0)
    assert strict["ndcg@10"] == lenient["ndcg@10"]


@pytest.fixture(scope="module")
def msmarco(tmp_path_factory):
    folder = tmp_path_factory.mktemp("msmarco")
    queries = "".join(f"{query_id}\t{text}\n" for query_id, text in QUERIES)
    qrels = "q0 0 d0 1\nd3 0 d6 1\nq2 0 d2 1\n"
    passages = "".join(f"{doc_id}\t{title} {text}\n" for doc_id, title, text in DOCS)
    documents = "".join(f"{doc_id}\thttp://{doc_id}\t{title}\t{text}\n" for doc_id, title, text in DOCS)
    for name, content in {
        "collection.tsv": passages,
        "queries.dev.small.tsv": queries,
        "qrels.dev.small.tsv": qrels,
        "msmarco-docs.tsv": documents,
        "msmarco-docdev-queries.tsv": queries,
        "msmarco-docdev-qrels.tsv": qrels,
    }.items():
        (folder / name).write_text(content)
    return folder


def test_msmarco_has_the_measures_of_its_kind_and_counts_every_judged_query(trained, msmarco, printed):
    passages = printed("evaluate msmarco", run_dir=trained, dataset_dir=msmarco)
    assert [*passages["dense"]] == ["mrr@10", "recall@50", "recall@1000"]
    assert passages["num_queries"] == 3
    for system, found in rankings(passages).items():
        ranks = [list(found[query_id]).index(doc_id) + 1 if doc_id in found[query_id] else np.inf
                 for query_id, doc_id in (("q0", "d0"), ("d3", "d6"), ("q2", "d2"))]  # fmt: skip
        assert passages[system]["mrr@10"] == pytest.approx(sum(1 / rank for rank in ranks) / 3, abs=1e-5)
    documents = printed("evaluate msmarco", run_dir=trained, dataset_dir=msmarco, kind="documents", split="dev")
    assert [*documents["dense"]] == ["mrr@100", "ndcg@10"]
    assert documents["dense"]["mrr@100"] == passages["dense"]["mrr@10"]  # the same texts
    maxp = printed(
        "evaluate msmarco", run_dir=trained, dataset_dir=msmarco, kind="documents", split="dev", passage_length=8, passage_stride=4
    )
    assert maxp["settings"]["passage_length"] == 8
    assert [len(docs) for docs in rankings(maxp)["dense"].values()] == [10, 10, 10]


def test_sentences_are_ranked_among_all(trained, dataset_dir, tmp_path, printed):
    report = printed("evaluate sentences", run_dir=trained, dataset_dir=dataset_dir, out_ranks=tmp_path / "ranks.json")
    assert metrics.means(metrics.of_first_ranks(json.loads((tmp_path / "ranks.json").read_text()))) == pytest.approx(
        report["dense"]
    )
    for system in ("dense", "bm25"):
        firsts = []
        for query_id, judged in QRELS["test"].items():
            found = list(rankings(report)[system][query_id])  # the whole corpus is less than the default depth
            firsts.append(min(([found.index(doc_id) + 1 for doc_id in judged if doc_id in found]), default=np.inf))
        assert report[system]["mrr"] == pytest.approx(np.mean([1 / rank for rank in firsts]), abs=1e-5)
        assert report[system]["p@1"] == pytest.approx(np.mean([rank == 1 for rank in firsts]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"passage_length": 8}, "leave --passage_length out"),
        ({"max_passages": 2, "max_doc_length": 6}, "documents of .*run are several passages, which have no ranks here"),
        ({"expansion": "generated.jsonl"}, "documents as views are several vectors, which have no ranks here"),
    ],
)
def test_sentences_of_several_vectors_are_refused_before_anything_is_encoded(
    trained, dataset_dir, printed, monkeypatch, flags, message
):
    monkeypatch.setattr(encode, "encode", None)
    with pytest.raises(InputError, match=message):
        printed("evaluate sentences", run_dir=trained, dataset_dir=dataset_dir, **flags)


def test_sentences_of_an_empty_query_count_zero_and_grades_may_be_too_low(trained, tmp_path, printed):
    (tmp_path / "qrels").mkdir()
    texts = {"a": "stone house", "b": "green tree"}
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"_id": name, "text": text}) + "\n" for name, text in texts.items()))
    queries = {"qa": "stone house", "qb": "green tree", "none": ""}
    (tmp_path / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": name, "text": text}) + "\n" for name, text in queries.items())
    )
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nqa\ta\t2\nqb\tb\t1\nnone\ta\t1\n")
    report = printed("evaluate sentences", dataset_dir=tmp_path, skip_empty=True)
    assert report["bm25"] == pytest.approx({"p@1": 2 / 3, "mrr": 2 / 3})
    report = printed("evaluate sentences", dataset_dir=tmp_path, skip_empty=True, min_relevance=2)
    assert report["bm25"] == pytest.approx({"p(rel=2)@1": 1 / 3, "mrr": 1 / 3})


def test_answers_have_no_grades(questions, printed):
    with pytest.raises(InputError, match="leave --min_relevance out"):
        printed("evaluate openqa", dataset_dir=questions, min_relevance=2)


def test_answers_count_where_they_stand_in_the_text_of_a_passage(trained, questions, printed):
    report = printed("evaluate openqa", run_dir=trained, dataset_dir=questions)
    # Every passage is found. "sea" stands in a title only; q2 has no answers and does not count.
    assert report["num_queries"] == 2
    assert report["dense"] == {"success@20": 0.5, "success@100": 0.5}
    first = printed("evaluate openqa", dataset_dir=questions, measures="Success@1")
    assert first["bm25"] == {"success@1": 0.5}


def test_bad_trec_files_are_refused(tmp_path, trec):
    def fault(**changes):
        with pytest.raises(InputError) as error:
            cli.call("evaluate trec", [f"--{name}={value}" for name, value in {**trec, **changes}.items() if value])
        return str(error.value)

    def file(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    assert "absent.tsv does not exist" in fault(corpus="absent.tsv")
    assert "is a folder; give a regular file" in fault(corpus=str(tmp_path))
    assert "absent.txt does not exist" in fault(qrels="absent.txt")
    assert "give --corpus and --topics to search" in fault(topics=None)
    assert "line 1: expected 2 tab-separated columns" in fault(topics=file("topics.tsv", "q0 red fox\n"))
    assert "qrels.txt, line 1: expected 3 (BEIR) or 4 (TREC) columns, found 2" in fault(qrels=file("qrels.txt", "q0 d0\n"))
    assert "judged queries that are not in" in fault(qrels=file("other.txt", "q7 0 d0 1\n"))
    assert "judged documents that are not in" in fault(qrels=file("other.txt", "q0 0 d77 1\n"))
    assert "empty.txt holds no judgement" in fault(qrels=file("empty.txt", ""))
    alone = {"corpus": None, "topics": None}
    assert "line 1: 2 columns in place of 6" in fault(run_file=file("broken.trec", "q0 d0\n"), **alone)
    assert "empty.trec holds no result" in fault(run_file=file("empty.trec", ""), **alone)
    assert "no judged query has results" in fault(run_file=file("strange.trec", "q9 Q0 d0 1 1.0 x\n"), **alone)
    assert fault(run_file="a.trec").startswith("--topics changes nothing beside --run_file; leave one")
    assert fault(run_file="a.trec", run_dir="runs/a", **alone).startswith("--run_dir changes nothing beside --run_file; leave one")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"_id": "q0", "answers": "fox"}', "line 1: answers is 'fox', expected a list"),
        ('{"_id": "q0", "answers": []}', "line 1: answers is"),
        ('{"_id": "q0"', "line 1: not valid JSON"),
        ('{"_id": "q0", "answers": [" "]}', "line 1: the answer ' ' has no word"),
        ('{"_id": "q0", "answers": ["a"]}\n{"_id": "q0", "answers": ["b"]}', "line 2: the question q0 was answered before"),
        ('{"_id": "q9", "answers": ["a"]}', "queries that are not in"),
        ("\n", "holds no answer"),
    ],
)
def test_bad_answers_are_refused(tmp_path, questions, content, message):
    (tmp_path / "answers.jsonl").write_text(content + "\n")
    with pytest.raises(InputError, match=message):
        cli.call("evaluate openqa", [f"--dataset_dir={questions}", f"--answers={tmp_path / 'answers.jsonl'}"])


def test_what_is_not_there_is_named(tmp_path, dataset_dir, msmarco):
    with pytest.raises(InputError, match=r"holds no answers\.jsonl"):
        cli.call("evaluate openqa", [f"--dataset_dir={dataset_dir}"])
    with pytest.raises(InputError, match=r"holds no collection\.tsv"):
        cli.call("evaluate msmarco", [f"--dataset_dir={tmp_path}"])
    with pytest.raises(InputError, match=r"has no split 'eval'; it has dev\.small"):
        cli.call("evaluate msmarco", [f"--dataset_dir={msmarco}", "--split=eval"])
    with pytest.raises(InputError, match="has no split 'dev'; it has test, train"):
        cli.call("evaluate sentences", [f"--dataset_dir={dataset_dir}", "--split=dev"])


@needs_real_data
def test_coverage_of_nq_is_that_of_its_gold_passages(printed):
    report = printed("evaluate openqa", dataset_dir=SHARED_DATA / "beir" / "nq-open-oracle")
    assert (report["num_docs"], report["num_queries"]) == (2600, 2655)
    assert report["bm25"]["success@20"] == pytest.approx(0.974, abs=0.003)
    assert report["bm25"]["success@100"] == pytest.approx(0.989, abs=0.003)


@needs_real_data
def test_sentences_of_xquad_by_bm25(printed):
    report = printed("evaluate sentences", dataset_dir=SHARED_DATA / "beir" / "xquad-en-sentence", measures=["P@1", "nDCG@10"])
    assert report["bm25"]["ndcg@10"] == pytest.approx(0.839, abs=0.003)
    assert report["bm25"]["p@1"] < report["bm25"]["mrr"] < report["bm25"]["ndcg@10"]


@needs_real_data
@pytest.mark.parametrize(
    ("topics", "qrels", "num_topics", "num_judged"),
    [
        ("topics.msmarco-passage.dev-subset.txt", "qrels.msmarco-passage.dev-subset.txt", 6980, 6980),
        ("topics.dl19-passage.txt", "qrels.dl19-passage.txt", 43, 43),
        ("topics.dl20.txt", "qrels.dl20-passage.txt", 200, 54),
    ],
)
def test_topics_and_judgements_of_trec_are_read(topics, qrels, num_topics, num_judged):
    folder = SHARED_DATA / "trec-dl"
    queries, judged = dict(beir.iter_queries(folder / topics)), beir.read_qrels(folder / qrels)
    assert (len(queries), len(judged)) == (num_topics, num_judged)
    assert judged.keys() <= queries.keys()
