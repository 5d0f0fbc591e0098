"""A teacher's scores stand beside the documents they are of, whatever is drawn, packed or shared out."""

import itertools

import numpy as np
import pytest
from toy_batches import pair_batches

from de_jax.data.batches import teacher_scores
from de_jax.data.batches.joined import joined_scores
from de_jax.data.batches.pair_batches import Negatives, TrainingPairs
from de_jax.data.batches.prefetch import prefetch
from de_jax.data.stores import corpus
from de_jax.types import PADDING_ID, InputError

NUM_QUERIES, NUM_DOCS, NUM_MINED = 9, 14, 4
PAIRS = np.array([[query, (3 * query + more) % NUM_DOCS] for query in range(NUM_QUERIES) for more in (0, 5)], np.int32)
rng = np.random.default_rng(0)
MINED = np.stack([rng.permutation(NUM_DOCS)[:NUM_MINED] for _ in PAIRS]).astype(np.int32)
MINED[(rng.random(MINED.shape) < 0.3) | (PAIRS[:, 1:] == MINED)] = PADDING_ID
HOLES = rng.random((len(PAIRS), 1 + NUM_MINED)) < 0.2
CANDIDATES = np.concatenate([PAIRS[:, 1:], MINED], axis=1)


def score(query, doc):
    return np.float32(query + doc / 100)


TABLE = np.where(HOLES | (CANDIDATES < 0), np.nan, score(PAIRS[:, :1], CANDIDATES)).astype(np.float32)
KNOWN = {(pair, doc) for pair, row in enumerate(np.where(HOLES, PADDING_ID, CANDIDATES).tolist()) for doc in row if doc >= 0}


@pytest.fixture(scope="module")
def stores(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("stores")
    sizes = {"q": NUM_QUERIES, "d": NUM_DOCS}
    texts = {name: [(f"{name}{i}", "the quick fox " * (1 + i % 3)) for i in range(size)] for name, size in sizes.items()}
    return tuple(corpus.build_token_store(texts[name], tokenizer, folder / name, progress=False) for name in sizes)


def batches(stores, scores, start=0, num_drawn=3, **options):
    negatives = {"neg_docs": Negatives(MINED, num_drawn)} if num_drawn else {}
    options = {"batch_size": 6, "unique_in_batch": False, "negatives": lambda step: negatives, "scores": scores, **options}
    return itertools.islice(pair_batches(*stores, PAIRS, **options)(start), 7)


def expected(batch, is_known):
    """By loops: the score of each text of the batch where the teacher has said something of it."""
    neg_doc_ids = batch.neg_doc_ids if batch.neg_doc_ids is not None else np.zeros((len(batch.doc_id), 0), np.int32)
    found = np.full((len(batch.doc_id), 1 + neg_doc_ids.shape[1]), np.nan, np.float32)
    for row, (query, doc) in enumerate(zip(batch.query_id.tolist(), batch.doc_id.tolist(), strict=True)):
        for place, candidate in enumerate([doc, *neg_doc_ids[row].tolist()]):
            if candidate != PADDING_ID and is_known(PAIRS.tolist().index([query, doc]), query, candidate):
                found[row, place] = score(query, candidate)
    return found


def of_array():
    return teacher_scores.of_array(TABLE, PAIRS, MINED)


@pytest.mark.parametrize("num_drawn", [0, 1, 3, 6])
def test_scores_follow_the_negatives_that_are_drawn(stores, num_drawn):
    seen = 0
    for batch in batches(stores, of_array(), num_drawn=num_drawn):
        assert batch.scores.shape == (6, 1 + num_drawn)
        assert batch.scores.dtype == np.float32
        np.testing.assert_array_equal(batch.scores, expected(batch, lambda pair, query, doc: (pair, doc) in KNOWN))
        seen += np.isfinite(batch.scores).sum()
    assert seen > 30


def test_scores_are_those_of_the_stream_at_any_step_packing_and_host(stores):
    whole = list(batches(stores, of_array()))
    for later, batch in zip(batches(stores, of_array(), start=4, pack=False), whole[4:], strict=False):
        np.testing.assert_array_equal(later.scores, batch.scores)
    hosts = [list(batches(stores, of_array(), host_index=host, num_hosts=2)) for host in range(2)]
    for batch, *shares in zip(whole, *hosts, strict=True):
        np.testing.assert_array_equal(np.concatenate([share.scores for share in shares]), batch.scores)
    for made, batch in zip(prefetch(batches(stores, of_array())), whole, strict=True):
        np.testing.assert_array_equal(made.scores, batch.scores)


@pytest.fixture
def score_file(tmp_path):
    """Scores of all texts with even documents, each after another score of it, and of texts that are nowhere."""
    even = [(query, doc) for query in range(NUM_QUERIES) for doc in range(0, NUM_DOCS, 2)]
    lines = [f"q{query}\td{doc}\t-5\n" for query, doc in even] + [f"q{query}\td{doc}\t{score(query, doc)}\n" for query, doc in even]
    (tmp_path / "scores.tsv").write_text("q0\tx\t9\nx\td0\t9\n" + "".join(lines))
    return tmp_path / "scores.tsv"


def test_a_file_scores_any_negatives_by_their_ids_and_its_last_line_counts(stores, score_file):
    scores = teacher_scores.of_file(score_file, TrainingPairs("toy", *stores, PAIRS))
    for batch in batches(stores, scores):
        np.testing.assert_array_equal(batch.scores, expected(batch, lambda pair, query, doc: doc % 2 == 0))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("q0\td0\n", r"scores\.tsv, line 1: expected a query id, a document id and a score, tab-separated\."),
        ("q0\td0\t1\nq0\td0\tnan\n", r"scores\.tsv, line 2: the score 'nan' is not a finite number"),
        ("q0\td13\t1\nx\td0\t1\n", r"scores\.tsv contains no score of a training pair; score this data set and split with de-jax"),
        ("", r"scores\.tsv contains no score of a training pair"),
    ],
)
def test_files_that_score_nothing_are_refused(stores, score_file, content, sentence):
    score_file.write_text(content)
    with pytest.raises(InputError, match=sentence):
        teacher_scores.of_file(score_file, TrainingPairs("toy", *stores, PAIRS))


def test_incomplete_folders_and_arrays_of_other_pairs_are_refused(stores, tmp_path):
    with pytest.raises(
        InputError, match=r"holds no complete teacher scores \(no manifest\.json\); run de-jax score pairs on it until it ends\."
    ):
        teacher_scores.of_file(tmp_path, TrainingPairs("toy", *stores, PAIRS))
    with pytest.raises(InputError, match="scores have 17 rows of 5, but there are 18 pairs of 5 documents"):
        teacher_scores.of_array(TABLE[1:], PAIRS, MINED)
    with pytest.raises(InputError, match="scores have 18 rows of 4, but there are 18 pairs of 5 documents"):
        teacher_scores.of_array(TABLE[:, 1:], PAIRS, MINED)


def test_scores_of_several_sources_are_found_by_pair_and_joined_document():
    """The second source's documents begin at row 100; the third has no scores and shares the first one's documents."""
    parts, sizes = [of_array(), of_array(), None], [len(PAIRS)] * 3
    scores = joined_scores(parts, [0, 100, 0], sizes)
    pair = int(np.flatnonzero(~HOLES[:, 0])[0])
    doc = int(PAIRS[pair, 1])
    chosen = pair + len(PAIRS) * np.arange(3)
    docs = np.array([[doc, PADDING_ID], [100 + doc, doc + 99], [doc, PADDING_ID]], np.int32)
    found = scores(chosen, docs)
    np.testing.assert_array_equal(found[:, 0], [TABLE[pair, 0], TABLE[pair, 0], np.nan])
    assert np.isnan(found[[0, 2], 1]).all()
