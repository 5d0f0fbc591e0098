import numpy as np
import pytest
from letters import Letters

from de_jax.data.stores.corpus import build_token_store
from de_jax.data.text.passages import PassageStore
from de_jax.types import PADDING_ID, InputError


@pytest.fixture
def store(tmp_path):
    texts = [("long", "abcdefghij"), ("short", "xy"), ("exact", "klmn"), ("more", "pqrst")]
    return build_token_store(texts, Letters(), tmp_path / "store", progress=False)


def text_of(row):
    return "".join(chr(token + 95) for token in row if 2 <= token < 28)


@pytest.mark.parametrize(
    ("stride", "expected"),
    [
        (None, ["abcd", "efgh", "ij", "xy", "klmn", "pqrs", "t"]),
        (2, ["abcd", "cdef", "efgh", "ghij", "xy", "klmn", "pqrs", "rst"]),
        (1, [*(f"{'abcdefghij'[i : i + 4]}" for i in range(7)), "xy", "klmn", "pqrs", "qrst"]),
    ],
)
def test_passages_are_windows_over_all_tokens_of_each_document(store, stride, expected):
    passages = PassageStore(store, 6, stride)
    assert passages.num_texts == len(expected)
    padded = passages.pad(np.arange(passages.num_texts), 6, 8)
    assert [text_of(row) for row in padded] == expected
    assert passages.lengths(6).tolist() == [len(text) + 2 for text in expected]
    for row, length in zip(padded, passages.lengths(6), strict=True):
        assert (row[0], row[length - 1], row[length:].any()) == (28, 1, False)
    ids = [store.ids[int(doc)] for doc in passages.doc_rows]
    assert list(passages.ids) == ids == passages.ids[:] == [passages.ids[row] for row in range(len(ids))]


def test_long_enough_passages_are_the_documents(store):
    passages, rows = PassageStore(store, 40), np.array([2, 0, 1])
    np.testing.assert_array_equal(passages.pad(rows, 40, 16), store.pad(rows, 40, 16))
    np.testing.assert_array_equal(passages.lengths(40), store.lengths(40))


def test_a_document_is_its_first_passages(store):
    every, first = PassageStore(store, 6), PassageStore(store, 6, max_passages=2)
    assert (every.most_passages, first.most_passages) == (3, 2)
    found = first.of_docs(np.array([[3, 0], [PADDING_ID, 1]]))
    padded = first.pad(found.reshape(-1), 6, 6).reshape(2, 2, 2, 6)
    assert [[text_of(row) for row in doc] for doc in padded[0]] == [["pqrs", "t"], ["abcd", "efgh"]]
    assert (found[1].tolist(), padded[1, 0].any()) == ([[PADDING_ID] * 2, [2, PADDING_ID]], False)
    assert [text_of(row) for row in padded[1, 1]] == ["xy", ""]
    np.testing.assert_array_equal(every.of_docs(np.arange(4))[0], [0, 1, 2])


def test_other_passages_have_another_hash(store):
    hashes = {PassageStore(store, *sizes).content_hash for sizes in ((6,), (5,), (6, 2))}
    hashes |= {PassageStore(store, 6, max_passages=most).content_hash for most in (1, 2)}
    assert len(hashes) == 5
    assert PassageStore(store, 6).content_hash == PassageStore(store, 6, 4).content_hash  # the default stride


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((2,), "no room beside the 2 special"), ((6, 5), "a stride of 5 does not fit"), ((6, 0), "a stride of 0 does not fit")],
)
def test_sizes_that_lose_tokens_are_refused(store, sizes, message):
    with pytest.raises(InputError, match=message):
        PassageStore(store, *sizes)


def test_a_document_without_passages_is_refused(store):
    with pytest.raises(InputError, match="max_passages is 0; give a document at least 1"):
        PassageStore(store, 6, max_passages=0)
