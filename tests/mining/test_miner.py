"""What is mined from embeddings made by hand, against loops; and what is said of it."""

import copy
from pathlib import Path

import numpy as np
import pytest

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations
from de_jax.data.negatives.generations import rows_of_pairs
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.stores import corpus
from de_jax.data.text import beir, tokenizing, vocabulary_training
from de_jax.data.text.passages import PassageStore
from de_jax.mining import miner
from de_jax.mining.miner import Embedded, Miner, mine, mine_bm25
from de_jax.training.run.run_folder import Run
from de_jax.types import InputError

NUM_QUERIES, NUM_DOCS, DIM = 7, 30, 5
PAIRS = np.array([[0, 0], [0, 3], [2, 3], [4, 8], [6, 9], [6, 0]], np.int32)
QUERY_ROWS = np.array([0, 2, 4, 6])


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    rng = np.random.default_rng(0)
    words = ["apple", "river", "engine", "violin", "castle", "pepper", "comet", "ladder"]
    texts = {
        "q": [(f"q{i}", " ".join(rng.choice(words, 6))) for i in range(NUM_QUERIES)],
        "d": [(f"d{i}", " ".join(rng.choice(words, 4 + 3 * (i % 5)))) for i in range(NUM_DOCS)],
    }
    texts["d"][5] = ("d5", texts["d"][0][1])  # the same text as the positive of q0
    texts["q"][2] = ("q2", texts["q"][4][1])
    vocabulary_training.train_sentencepiece((t for _, t in texts["d"]), folder / "spiece.model", vocab_size=28)
    tokenizer = tokenizing.load_tokenizer(folder / "spiece.model")
    return tuple(corpus.build_token_store(texts[kind], tokenizer, folder / kind, progress=False) for kind in "qd")


@pytest.fixture(scope="module")
def texts(stores):
    return TrainingPairs("toy", *stores, PAIRS, {})


@pytest.fixture(scope="module")
def embedded():
    rng = np.random.default_rng(1)
    queries, docs = (rng.normal(size=(size, DIM)).astype(np.float32) for size in (len(QUERY_ROWS), NUM_DOCS))
    return Embedded(8, QUERY_ROWS, queries, docs, None, {})


def mined_lines(*args, mine=mine, **options):
    mined, facts = mine(*args, **options)
    return list(mined.lines()), facts


def docs_of(query):
    return {doc for other, doc in PAIRS.tolist() if other == query}


def queries_of(doc):
    return {query for query, other in PAIRS.tolist() if other == doc}


def test_negatives_are_the_nearest_documents_and_queries_without_any_known_pair(texts, embedded):
    lines, facts = mined_lines(embedded, texts, Miner(num_neg_docs=4, num_neg_queries=2, last_rank=4))
    for (query, doc), line in zip(PAIRS.tolist(), lines, strict=True):
        assert (line.query_id, line.doc_id) == (f"q{query}", f"d{doc}")
        place = QUERY_ROWS.tolist().index(query)
        nearest = [d for d in np.argsort(-(embedded.docs @ embedded.queries[place])).tolist() if d not in docs_of(query)]
        assert sorted(line.neg_doc_ids) == sorted(f"d{d}" for d in nearest[:4])
        asked = [QUERY_ROWS[q] for q in np.argsort(-(embedded.queries @ embedded.docs[doc])).tolist()]
        others = [q for q in asked if q not in queries_of(doc)]
        assert len(line.neg_query_ids) == min(2, len(others))
        assert set(line.neg_query_ids) <= {f"q{q}" for q in others[:4]}
    assert facts["neg_docs"]["num_chosen"] == 4 * len(PAIRS)
    assert facts["statistics"] == {}


def test_each_checkpoint_draws_other_negatives_and_the_same_checkpoint_the_same(texts, embedded):
    miner = Miner(num_neg_docs=4, num_neg_queries=1, last_rank=20)
    at_8, again, at_16 = (mined_lines(embedded._replace(step=step), texts, miner)[0] for step in (8, 8, 16))
    assert at_8 == again
    for field in ("neg_doc_ids", "neg_query_ids"):
        assert [getattr(line, field) for line in at_8] != [getattr(line, field) for line in at_16]


def test_what_is_searched_knows_its_checkpoint(texts, monkeypatch):
    for kind in ("docs", "queries"):
        monkeypatch.setattr(miner.encode, kind, lambda *args, **options: np.zeros((1, DIM), np.float32))
    run = Run(Path(), 7, *[None] * 4)
    assert miner.embed(run, texts, keep_as=None).step == 7


def test_a_document_of_several_passages_ranks_as_its_best_one(stores, texts):
    passages = PassageStore(stores[1], 6, max_passages=3)
    rng = np.random.default_rng(2)
    docs = rng.normal(size=(passages.num_texts, DIM)).astype(np.float32)
    queries = rng.normal(size=(len(QUERY_ROWS), DIM)).astype(np.float32)
    found = Embedded(8, QUERY_ROWS, queries, docs, None, {})
    lines, _ = mined_lines(found, texts._replace(passages=passages), Miner(num_neg_docs=3, last_rank=3, margin=0.5))
    for (query, doc), line in zip(PAIRS.tolist(), lines, strict=True):
        scores = docs @ queries[QUERY_ROWS.tolist().index(query)]
        best = [max(scores[row] for row in range(len(scores)) if passages.doc_rows[row] == d) for d in range(NUM_DOCS)]
        nearest = [d for d in np.argsort(-np.array(best)).tolist() if d not in docs_of(query)][:3]
        assert sorted(line.neg_doc_ids) == sorted(f"d{d}" for d in nearest if best[d] <= best[doc] - 0.5)
    with pytest.raises(InputError, match="mined queries are for documents of one passage"):
        mine(found, texts._replace(passages=passages), Miner(num_neg_queries=1))


def test_a_teachers_file_refuses_in_both_directions(texts, embedded, tmp_path):
    path = tmp_path / "teacher.tsv"
    path.write_text(
        "".join(f"q{q}\td{d}\t{0.9 if d == 1 or q == 4 else 0.1}\n" for q in range(NUM_QUERIES) for d in range(NUM_DOCS))
    )
    miner = Miner(num_neg_docs=30, num_neg_queries=9, teacher_scores=str(path), max_teacher_score=0.5)
    lines, facts = mined_lines(embedded, texts, miner)
    assert all("d1" not in line.neg_doc_ids and "q4" not in line.neg_query_ids for line in lines)
    assert facts["neg_docs"]["num_filtered"]["max_teacher_score"] == 5 + (NUM_DOCS - 1)
    faults = {"q0\td0\n": "expected a query id, a document id and a score", "q0\td0\tnan\n": "the score 'nan' is not a finite"}
    for line, message in faults.items():
        path.write_text(line)
        with pytest.raises(InputError, match=f"teacher.tsv, line 1: {message}"):
            mine(embedded, texts, miner)


def test_texts_that_say_what_the_positive_says_are_refused_in_both_directions(texts, embedded):
    kept, _ = mined_lines(embedded, texts, Miner(num_neg_docs=30, num_neg_queries=9))
    lines, facts = mined_lines(embedded, texts, Miner(num_neg_docs=30, num_neg_queries=9, max_resemblance=0.9))
    assert "d5" in kept[0].neg_doc_ids
    assert "d5" not in lines[0].neg_doc_ids
    assert "d5" in lines[1].neg_doc_ids  # the same query, but another positive
    assert "q4" in kept[2].neg_query_ids
    assert "q4" not in lines[2].neg_query_ids
    assert facts["neg_docs"]["num_filtered"]["duplicate"] == 2  # of q0 and of q6, whose positive d0 is too


def test_a_text_with_the_anchors_id_is_mined_only_when_asked(texts, embedded):
    docs = copy.copy(texts.doc_store)
    docs.ids = ["q0" if doc_id == "d12" else "q4" if doc_id == "d8" else doc_id for doc_id in texts.doc_store.ids]
    docs.encoded_ids = np.array([doc_id.encode() for doc_id in docs.ids])
    row_of = {doc_id: row for row, doc_id in enumerate(docs.encoded_ids.tolist())}
    docs.rows_of = lambda ids: np.array([row_of.get(doc_id, -1) for doc_id in ids])
    same = texts._replace(doc_store=docs, pairs=np.array([[0, 0], [2, 8], [4, 9], [6, 9]], np.int32))
    miner = Miner(num_neg_docs=30, num_neg_queries=9)
    for texts, is_mined in ((same, False), (same._replace(drop_identical_ids=False), True)):
        lines, _ = mined_lines(embedded, texts, miner)
        assert ("q0" in lines[0].neg_doc_ids) == is_mined
        assert ("q4" in lines[1].neg_query_ids) == is_mined  # the document "q4"
        assert "q0" in lines[1].neg_doc_ids


def test_bm25_mines_a_document_with_the_querys_id_only_when_asked():
    docs = beir.Texts(["q", "d", "e"], ["red fox", "red fox runs", "a red whale"])
    dataset = beir.Dataset("same", docs, beir.Texts(["q"], ["red fox"]), {"q": {"d": 1, "empty": 1}, "empty": {"e": 1}})
    with pytest.warns(UserWarning, match="relevant pairs left out, .*: 2"):
        (line,), _ = mined_lines(dataset, Miner(), mine=mine_bm25)
    assert line.neg_doc_ids == ["e"]
    (line,), _ = mined_lines(dataset, Miner(last_rank=2**31 - 1), drop_identical_ids=False, mine=mine_bm25)  # as deep as the corpus
    assert sorted(line.neg_doc_ids) == ["e", "q"]


def test_bm25_that_finds_no_negative_at_all_is_refused():
    docs = beir.Texts(["d", "e"], ["red fox", "blue whale"])
    dataset = beir.Dataset("apart", docs, beir.Texts(["q", "p"], ["red fox", "blue whale"]), {"q": {"d": 1}, "p": {"e": 1}})
    with pytest.raises(InputError, match="BM25 finds no negative for any query"):
        mine_bm25(dataset, Miner())


def test_a_copy_of_a_positive_is_no_negative_and_copies_are_mined_once(stores, embedded):
    """d5 has the text of d0, and q2 that of q4."""
    texts = TrainingPairs("toy", *stores, PAIRS, {}).with_equal_texts(64, 64)
    assert texts.by_text[2].tolist() == [2, 3]
    assert texts.by_text[3].tolist() == [2, 8]
    of_text = Embedded(8, np.array([0, 2, 6]), embedded.queries[:3], embedded.docs, None, {})
    lines, _ = mined_lines(of_text, texts, Miner(num_neg_docs=40, num_neg_queries=3))
    assert [(line.query_id, line.doc_id) for line in lines] == [(f"q{query}", f"d{doc}") for query, doc in PAIRS.tolist()]
    for line in lines:
        assert "d5" not in line.neg_doc_ids
        assert not {"q2", "q4"} <= {line.query_id, *line.neg_query_ids}
        assert len(set(line.neg_doc_ids)) == len(line.neg_doc_ids)
    assert {"d0"} < set(lines[2].neg_doc_ids)
    assert not {"d3", "d8"} & set(lines[2].neg_doc_ids + lines[3].neg_doc_ids)
    assert len(lines[0].neg_doc_ids) == NUM_DOCS - 3


def test_bm25_mines_no_copy_of_a_positive():
    docs = beir.Texts(["d", "e", "f", "g"], ["red fox runs", "red fox", "red fox runs", "red fox"])
    queries = beir.Texts(["q", "p"], ["red fox", "red fox"])
    dataset = beir.Dataset("same", docs, queries, {"q": {"d": 1}, "p": {"f": 1}})
    lines, _ = mined_lines(dataset, Miner(), mine=mine_bm25)
    assert [(line.query_id, line.doc_id, line.neg_doc_ids) for line in lines] == [("q", "d", ["e"]), ("p", "f", ["e"])]


def test_statistics_are_shares_of_what_was_mined(texts, embedded, tmp_path):
    miner = Miner(num_neg_docs=2, last_rank=4)
    lines, facts = mined_lines(embedded, texts, miner)
    before = [Mined(line.query_id, line.doc_id, [line.neg_doc_ids[0], "d29"], []) for line in lines]
    previous = rows_of_pairs(generations.write_lines(tmp_path / "negatives", 1, before, {}), texts)["neg_docs"]
    again, facts = mined_lines(embedded, texts, miner, previous=previous, score=lambda index: {"ndcg@10": 0.5})
    assert again == lines
    in_common = [len(set(line.neg_doc_ids) & set(old.neg_doc_ids)) for line, old in zip(lines, before, strict=True)]
    assert facts["statistics"] == pytest.approx(
        {
            "overlap_previous": sum(in_common) / 12,
            "previous_in_top_100": 1.0,  # there are no more than 30 documents
            "dev/ndcg@10": 0.5,
        }
    )
    assert facts["seconds"].keys() == {"index", "search", "choose", "statistics"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"first_rank": 3, "last_rank": 2}, "ranks 3 to 2 hold no candidate"),
        ({"num_neg_docs": 0}, "num_neg_docs is 0"),
        ({"max_teacher_score": 0.5}, "teacher_scores and max_teacher_score go together"),
        ({"max_resemblance": 1.5}, "max_resemblance is 1.5; it must be at most 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        Miner(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"teacher_scores": "absent.tsv", "max_teacher_score": 0.5}, r"absent\.tsv does not exist"),
        ({"index": "IVF,no"}, "IVF,no"),
    ],
)
def test_files_that_are_not_there_are_refused_before_anything_is_encoded(options, sentence):
    with pytest.raises(InputError, match=sentence):
        Miner(**options).check()
