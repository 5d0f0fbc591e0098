"""Documents of batches with the queries that a curriculum chooses, positives and hard negatives alike, the same after a restart."""

import json

import numpy as np
import pytest
from flat_settings import flat

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.expansion.curriculum import Curriculum
from de_jax.data.expansion.curriculum_texts import open_expansion
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.training_set import beir_pairs, open_stores
from de_jax.data.text import beir, tokenizing, vocabulary_training
from de_jax.types import PADDING_ID, InputError

TOPICS = ("apple", "river", "engine", "violin")
RANKED = ("where is {0} number {1}", "{0} and something", "nothing of the kind")
"""A document's queries from the nearest to its pair's own, "{topic} number {i}", to the farthest; in the file the other way."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("curriculum")
    docs = [(f"d{i}", "", f"a text of {TOPICS[i % 4]} {i} and more words than there is room for in a row") for i in range(12)]
    queries = [(f"q{i}", f"{TOPICS[i % 4]} number {i}") for i in range(12)]
    beir.write(root / "data", docs, queries, {"train": {f"q{i}": {f"d{i}": 1} for i in range(12)}})
    generated = {f"d{i}": [query.format(TOPICS[i % 4], i) for query in reversed(RANKED)] for i in range(11)}
    lines = [json.dumps({"_id": doc_id, "queries": own}) for doc_id, own in generated.items()]  # d11 has none
    (root / "expansion.jsonl").write_text("\n".join(lines) + "\n")
    words = [line for doc in docs for line in (doc[2], *generated.get(doc[0], []))] + [query[1] for query in queries]
    vocabulary_training.train_sentencepiece(words, root / "spiece.model", vocab_size=60)
    return root


def opened(folder, *, strategy="curriculum", num_steps=6, **changes):
    options = {"batch_size": 4, "max_query_length": 16, "max_doc_length": 90, "pack": False, "max_generated_length": 40, **changes}
    return flat(beir_pairs)(
        dataset_dir=str(folder / "data"),
        tokenizer=str(folder / "spiece.model"),
        cache_dir=str(folder / "cache"),
        expansion=str(folder / "expansion.jsonl"),
        curriculum=Curriculum(strategy=strategy, num_steps=num_steps, num_groups=3, k=1),
        **options,
    )


def texts_of(data, batch):
    """Each document of a batch as words, by its number."""
    rows = [row[row > 1] for row in batch.doc]  # without padding and ends of texts
    return dict(zip(batch.doc_id.tolist(), data.doc.tokenizer.decode(rows), strict=True))


def expected(doc, rank):
    return RANKED[rank].format(TOPICS[doc % 4], doc)


def test_documents_get_the_least_relevant_query_first_and_the_most_relevant_last(folder):
    data = opened(folder)
    stream = data.batches(0)
    for step in range(6):
        for doc, found in texts_of(data, next(stream)).items():
            assert found.startswith(f"a text of {TOPICS[doc % 4]}")
            if doc == 11:
                assert "row" in found  # whole, since it has no query
            else:
                assert found.endswith(expected(doc, 2 - step // 2)), (step, found)


@pytest.mark.parametrize(("strategy", "rank"), [("top_1", 0), ("bottom_k", 2), ("gold", None)])
def test_other_strategies_keep_to_their_queries(folder, strategy, rank):
    data = opened(folder, strategy=strategy)
    stream = data.batches(0)
    for _ in range(3):
        for doc, found in texts_of(data, next(stream)).items():
            if rank is None:
                assert found.endswith(f"{TOPICS[doc % 4]} number {doc}")
            elif doc != 11:
                assert found.endswith(expected(doc, rank))


def test_a_resumed_stream_goes_on_in_the_same_group_with_the_same_draws(folder):
    data, again = opened(folder, strategy="random"), opened(folder, strategy="random")
    stream = data.batches(0)
    batches = [next(stream) for _ in range(5)]
    for step, batch in enumerate(batches):
        resumed = next(again.batches(step))
        np.testing.assert_array_equal(batch.doc, resumed.doc)
        np.testing.assert_array_equal(batch.doc_id, resumed.doc_id)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"relevance_file": "scores.jsonl", "negatives_dir": "somewhere"}, "has no scores for hard negatives"),
        ({"max_passages": 2}, "documents of one passage"),
        ({"max_doc_length": 8}, "max_doc_length is 8, in which no generated query has room beside a token of the document"),
        ({"strategy": "gold", "negatives_dir": "somewhere"}, "has no query for hard negatives"),
    ],
)
def test_what_cannot_be_expanded_is_refused(folder, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        opened(folder, **changes)


def test_generated_queries_without_room_are_counted(folder):
    with pytest.warns(UserWarning, match=r"\d+% of the generated queries have no room in max_doc_length = 16 beside a token"):
        opened(folder, max_doc_length=16)


def test_hard_negatives_are_ranked_by_the_query_of_their_row(folder):
    tokenizer = tokenizing.load_tokenizer(folder / "spiece.model")
    pairs = np.stack([np.arange(12), np.arange(12)], axis=1).astype(np.int32)
    golds = [f"{TOPICS[i % 4]} number {i}" for i in range(12)]
    golds[1] = "nothing of the sort"  # for which the last of the three is the nearest
    queries, docs = open_stores(folder / "data", tokenizer, tokenizer, folder / "cache")
    found = TrainingPairs("toy", queries, docs, pairs, doc_tokenizer=tokenizer, own_queries=lambda: golds)
    options = PairsOptions(expansion=str(folder / "expansion.jsonl"), max_generated_length=40)
    curriculum = Curriculum("top_1", num_steps=6)
    texts = open_expansion(found, options, curriculum, has_neg_docs=True, cache_dir=folder / "cache")
    rows = texts.rows_of(np.array([[2, 3], [3, PADDING_ID], [11, 2]]), np.array([0, 1, 1]), 0)
    assert rows[1, 1] == PADDING_ID
    found = tokenizer.decode([row[row > 1] for row in texts.store.pad(np.delete(rows.reshape(-1), 3), 90, 90)])
    for words, doc, rank in zip(found, [2, 3, 3, None, 2], [0, 0, 2, None, 2], strict=True):
        assert words.endswith("a row" if doc is None else expected(doc, rank)), words
