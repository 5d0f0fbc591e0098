"""Training pairs of several folders as one stream."""

import numpy as np
import pytest
import toy_run

from de_jax.data.text import beir
from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.doc2query.generator_run import doc_query_pairs
from de_jax.types import InputError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    first = toy_run.write_dataset(tmp_path_factory.mktemp("data") / "first")
    second = first.parent / "second"
    beir.write(second, [("d0", "a title", "other 0"), ("d9", "", "other 9")], [("q0", "other words")], {"train": {"q0": {"d9": 1}}})
    return first, second


def texts_of(folders, tokenizer, cache_dir, num_batches=9, start=0, **options):
    data = doc_query_pairs(folders, tokenizer, batch_size=9, cache_dir=cache_dir, **options)
    found = []
    for _, batch in zip(range(num_batches), data.batches(start), strict=False):
        for doc, query in zip(batch.doc, batch.query, strict=True):
            found.append(tuple(tokenizer.decode([doc[doc > 1], query[query > 1]])))
            assert [row[np.count_nonzero(row) - 1] for row in (doc, query)] == [1, 1]
    return found, len(data.texts.pairs)


def test_pairs_of_several_folders_with_the_same_ids_are_all_there_once(folders, tmp_path):
    tokenizer = load_tokenizer(folders[0] / "spiece.model")
    found, num_pairs = texts_of(folders, tokenizer, tmp_path)
    assert num_pairs == len(set(found)) == 81
    docs, queries = (dict(beir.iter_docs(folders[0] / "corpus.jsonl.gz")), dict(beir.iter_queries(folders[0] / "queries.jsonl")))
    expected = {(docs[f"d{i}"], queries[f"q{i}"]) for i in range(80)}
    normal = lambda pairs: {tuple(tokenizer.decode(tokenizer.encode(pair))) for pair in pairs}  # noqa: E731
    assert set(found) == normal({*expected, ("other 9", "other words")})


def test_batches_from_a_step_on_are_the_same_without_those_before(folders, tmp_path):
    tokenizer = load_tokenizer(folders[0] / "spiece.model")
    whole, _ = texts_of(folders, tokenizer, tmp_path)
    assert texts_of(folders, tokenizer, tmp_path, num_batches=2, start=7)[0] == whole[63:]


def test_a_vocabulary_without_an_end_is_refused(folders, tmp_path):
    tokenizer = load_tokenizer(folders[0] / "spiece.model")
    tokenizer.suffix_ids = ()
    with pytest.raises(InputError, match="adds no end token"):
        doc_query_pairs(folders, tokenizer, cache_dir=tmp_path)
