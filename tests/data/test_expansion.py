"""Expanded documents as tokens, against the same made by hand."""

import json

import numpy as np
import pytest
from pretrained_folders import write_tokenizer

from de_jax.data.expansion import document_texts
from de_jax.data.expansion.curriculum import NONE, Curriculum, rank_queries
from de_jax.data.expansion.document_texts import (
    ExpandedTexts,
    TextsWithOneQuery,
    corpus_expansion,
    document_expansion,
)
from de_jax.data.expansion.query_store import open_queries
from de_jax.data.expansion.relevance import rouge_l
from de_jax.data.stores.corpus import build_token_store
from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.retrieval.encode import Store, plan
from de_jax.types import InputError

DOCS = ["hello world a dense retrieval", "texts", "a passage of dense texts of texts"]
QUERIES = [["hello hello", " ", "world", "hello hello", "dense retrieval of texts"], [], ["passage"]]


@pytest.fixture(params=["bert", "t5"])
def made(request, tmp_path):
    write_tokenizer(tmp_path, request.param)
    tokenizer = load_tokenizer(tmp_path)
    docs = build_token_store([(f"d{row}", text) for row, text in enumerate(DOCS)], tokenizer, tmp_path / "docs")
    return tokenizer, docs, opened(QUERIES, docs, tokenizer, tmp_path)


def opened(queries, docs, tokenizer, folder):
    """Each document's queries, by an expansion in a file."""
    lines = (json.dumps({"_id": docs.ids[row], "queries": own}) + "\n" for row, own in enumerate(queries))
    (folder / "expansion.jsonl").write_text("".join(lines))
    return open_queries(folder / "expansion.jsonl", docs, tokenizer, folder / "cache")


def by_hand(tokenizer, doc, queries, max_length, max_query_length=32):
    """Lists of ids: queries first get their room, then the document what is left."""
    doc, *queries = [ids.tolist() for ids in tokenizer.encode([doc, *queries])]
    end = list(tokenizer.suffix_ids)
    tail = [id_ for query in queries for id_ in [*end, *query[:max_query_length]]]
    room = max_length - len(tokenizer.prefix_ids) - len(end) - len(tail)
    return [*tokenizer.prefix_ids, *doc[:room], *tail, *end]


def rows_of(texts, max_length):
    lengths = texts.lengths(max_length)
    padded = texts.pad(np.arange(texts.num_texts), max_length, max_length)
    assert not any(row[length:].any() for row, length in zip(padded, lengths, strict=True))
    return [row[:length].tolist() for row, length in zip(padded, lengths, strict=True)]


@pytest.mark.parametrize("max_length", [40, 9])
def test_views_of_a_corpus_have_one_query_each_and_cut_the_document_not_the_query(made, max_length):
    tokenizer, docs, generated = made
    texts = corpus_expansion(docs, generated, 3)
    views = [(0, [0]), (0, [2]), (0, [4]), (1, []), (2, [0])]
    assert list(texts.ids) == [f"d{doc}" for doc, _ in views]
    expected = [by_hand(tokenizer, DOCS[doc], [QUERIES[doc][i] for i in own], max_length) for doc, own in views]
    assert rows_of(texts, max_length) == expected


def test_one_text_takes_several_queries(made):
    tokenizer, docs, generated = made
    texts = document_expansion(docs, generated, 2, max_query_length=1)
    own = [["hello", "world"], [], ["passage"]]
    assert rows_of(texts, 12) == [by_hand(tokenizer, doc, queries, 12) for doc, queries in zip(DOCS, own, strict=True)]


def test_a_query_that_does_not_fit_beside_a_token_of_the_document_is_left_out(made):
    tokenizer, docs, generated = made
    specials = len(tokenizer.prefix_ids) + len(tokenizer.suffix_ids)
    texts = document_expansion(docs, generated, 2)
    for max_length in range(specials + 1, specials + 12):
        for row, queries, doc in zip(rows_of(texts, max_length), (["hello hello", "world"], [], ["passage"]), DOCS, strict=True):
            assert len(row) <= max_length
            kept = row.count(tokenizer.suffix_ids[0]) - 1
            assert row == by_hand(tokenizer, doc, queries[:kept], max_length)
            assert row[len(tokenizer.prefix_ids)] == tokenizer.encode([doc])[0][0]


def test_what_a_curriculum_chooses_is_a_row_of_the_training_texts(made):
    tokenizer, docs, generated = made
    texts = TextsWithOneQuery(docs, generated)
    bare = texts.bare
    pairs = np.array([[0, 0], [1, 1], [2, 2]])
    ranked = rank_queries(["world hello", "x", "passage"], QUERIES.__getitem__, rouge_l)
    chosen = Curriculum("top_1", 10).choose(ranked, np.arange(3), 0)
    assert chosen.tolist() == [2, NONE, NONE]  # the last one's only query is the gold one
    rows = bare[pairs[:, 1]] + 1 + chosen
    expected = [
        by_hand(tokenizer, DOCS[0], ["world"], 20),
        by_hand(tokenizer, DOCS[1], [], 20),
        by_hand(tokenizer, DOCS[2], [], 20),
    ]
    padded = texts.pad(np.array([*rows, -1]), 20, 20)
    assert [row[row != 0].tolist() for row in padded] == [*expected, []]
    np.testing.assert_array_equal(texts.pad(bare, 9, 9), docs.pad(np.arange(3), 9, 9))
    assert texts.num_texts == len(DOCS) + sum(map(len, QUERIES))


def test_encoding_takes_expanded_documents_as_they_are(made):
    _, docs, generated = made
    texts = corpus_expansion(docs, generated, 2)
    assert isinstance(texts, Store)
    lengths = texts.lengths(12)
    for batch in plan(lengths, tokens_per_batch=64):
        packed = batch.tokens(texts, np.arange(texts.num_texts), 12)
        assert packed.lengths.sum() == lengths[batch.positions].sum() == np.count_nonzero(packed.tokens)


def test_queries_are_tokenized_once(made, tmp_path):
    tokenizer, docs, generated = made
    (folder,) = (tmp_path / "cache").glob("generated-*")
    before = (folder / "tokens.npy").stat().st_mtime_ns
    assert opened(QUERIES, docs, tokenizer, tmp_path).content_hash == generated.content_hash
    assert [(folder / "tokens.npy").stat().st_mtime_ns] == [before]
    assert len(list((tmp_path / "cache").glob("generated-*"))) == 1


def test_lengths_are_those_of_padded_texts_also_of_many_documents(made, tmp_path, monkeypatch):
    tokenizer, _, _ = made
    monkeypatch.setattr(document_texts, "_DOCS", 7)
    rng = np.random.default_rng(0)
    words = [word for doc in DOCS for word in doc.split()]
    sentences = [" ".join(rng.choice(words, size)) for size in rng.integers(1, 9, 300)]
    docs = build_token_store([(str(row), text) for row, text in enumerate(sentences[:60])], tokenizer, tmp_path / "many")
    queries = [list(rng.choice(sentences, size)) for size in rng.integers(0, 6, 60)]
    texts = TextsWithOneQuery(docs, opened(queries, docs, tokenizer, tmp_path), max_query_length=4)
    for max_length in (5, 9, 12, 100):
        lengths, rows = texts.lengths(max_length), np.arange(texts.num_texts)
        padded = texts.pad(rows, max_length, max_length)
        np.testing.assert_array_equal(lengths[rows], np.count_nonzero(padded, axis=1))
        assert lengths.max() == lengths[rows].max()
        np.testing.assert_array_equal(lengths[rows[:6].reshape(2, 3)], lengths[rows[:6]].reshape(2, 3))
    own = [text for doc, generated in enumerate(queries) for text in ([], *([query] for query in generated))]
    of = [doc for doc, generated in enumerate(queries) for _ in range(1 + len(generated))]
    expected = [by_hand(tokenizer, sentences[doc], text, 100, 4) for doc, text in zip(of, own, strict=True)]
    assert [row[row != 0].tolist() for row in padded] == expected


@pytest.mark.parametrize(("name", "content"), [("tokens.npy", b"x"), ("manifest.json", b"{}"), ("texts.npy", b"")])
def test_damaged_tokens_are_made_again(made, tmp_path, name, content):
    tokenizer, docs, generated = made
    before = generated.tokens.tolist()
    (folder,) = (tmp_path / "cache").glob("generated-*")
    (folder / name).write_bytes(content)
    assert opened(QUERIES, docs, tokenizer, tmp_path).tokens.tolist() == before


def test_texts_differ_by_their_hash_and_ill_fitting_stores_are_refused(made, tmp_path):
    tokenizer, docs, generated = made
    hashes = {corpus_expansion(docs, generated, count).content_hash for count in (1, 2, 2)}
    hashes.add(corpus_expansion(docs, generated, 2, max_query_length=3).content_hash)
    assert len(hashes) == 3
    with pytest.raises(InputError, match="has no query for any document here"):
        opened([[], []], docs, tokenizer, tmp_path)
    with pytest.raises(InputError, match="give at least 1"):
        corpus_expansion(docs, generated, 0)
    with pytest.raises(InputError, match="at least 1 token"):
        ExpandedTexts(docs, generated, np.array([0]), np.array([[0]]), max_query_length=0)
