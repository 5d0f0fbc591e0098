import json
import re
import subprocess
import sys

import numpy as np
import pytest

from de_jax.data.stores import corpus
from de_jax.data.text import tokenizing
from de_jax.types import InputError

TEXTS = [("d3", "the quick brown fox jumps over the lazy dog"), ("d1", "dog"), ("é", "seven wizards boxed"), ("d10", "a fox")]


@pytest.fixture
def store(tmp_path, tokenizer):
    return corpus.build_token_store(TEXTS, tokenizer, tmp_path / "store", progress=False)


class OneByteTokenizer:
    """Bytes plus one, with chosen special tokens."""

    vocab_size = 300
    pad_id = 0
    fingerprint = "bytes"

    def __init__(self, prefix_ids=(), suffix_ids=()):
        self.prefix_ids, self.suffix_ids = prefix_ids, suffix_ids

    def encode(self, texts):
        return [np.frombuffer(one.encode(), dtype=np.uint8).astype(np.int32) - 48 for one in texts]

    def decode(self, ids):
        raise NotImplementedError

    def save(self, directory):
        raise NotImplementedError


def test_store_holds_the_tokens_of_every_text_in_order(store, tokenizer):
    assert list(store.ids) == [text_id for text_id, _ in TEXTS]
    assert (store.ids[2], store.ids[-1], store.ids[1:3]) == ("é", "d10", ["d1", "é"])
    assert (store.num_texts, store.tokens.dtype, store.vocab_size) == (4, np.int32, 36)
    assert (store.tokenizer_fingerprint, store.suffix_ids) == (tokenizer.fingerprint, (1,))
    for row, (_, one) in enumerate(TEXTS):
        np.testing.assert_array_equal(store.tokens[store.offsets[row] : store.offsets[row + 1]], tokenizer.encode([one])[0])


def test_arrays_are_memory_mapped_and_free_of_pickles(store):
    assert isinstance(store.tokens.base, np.memmap)
    assert isinstance(store.offsets.base, np.memmap)
    for file in store.store_dir.glob("*.npy"):
        np.load(file, allow_pickle=False)


def test_row_of_finds_every_id_and_no_other(store):
    assert [store.row_of(text_id) for text_id, _ in TEXTS] == [0, 1, 2, 3]
    assert store.rows_of(["d10", "d100", "d", "", "zzz", "d1"]).tolist() == [3, -1, -1, -1, -1, 1]
    with pytest.raises(InputError, match="no text with the id 'd100'"):
        store.row_of("d100")


def naive_pad(store, tokenizer, rows, max_length, pad_to):
    padded = []
    for row in rows:
        room = max_length - len(store.prefix_ids) - len(store.suffix_ids)
        tokens = [*store.prefix_ids, *tokenizer.encode([TEXTS[row][1]])[0].tolist()[:room], *store.suffix_ids] if row >= 0 else []
        padded.append(tokens + [0] * (pad_to - len(tokens)))
    return padded


@pytest.mark.parametrize("specials", [((), (1,)), ((2,), (3,)), ((), ()), ((2, 4), (3, 5, 6))])
@pytest.mark.parametrize("max_length", [6, 9, 64])
def test_pad_equals_the_loop(tmp_path, tokenizer, monkeypatch, specials, max_length):
    monkeypatch.setattr(tokenizer, "prefix_ids", specials[0])
    monkeypatch.setattr(tokenizer, "suffix_ids", specials[1])
    store = corpus.build_token_store(TEXTS, tokenizer, tmp_path / "store", progress=False)
    rows = [2, 0, -1, 3, 0, 1]
    padded = store.pad(np.array(rows, dtype=np.int32), max_length, 64)
    assert padded.dtype == np.int32
    assert padded.tolist() == naive_pad(store, tokenizer, rows, max_length, 64)
    assert store.lengths(max_length).tolist() == np.count_nonzero(store.pad(np.arange(4), max_length, 64), axis=1).tolist()


def test_pad_of_filler_rows_is_all_padding(store):
    assert not store.pad(np.array([-1, -1]), 8, 8).any()


def test_lengths_without_room_for_text_are_refused(store):
    with pytest.raises(InputError, match="maximum length of 1 leaves no room"):
        store.lengths(1)
    with pytest.raises(ValueError, match="pad_to=4 is shorter"):
        store.pad(np.arange(4), 64, 4)


def test_content_hash_names_the_content_and_not_the_chunks(tmp_path, tokenizer, store, monkeypatch):
    monkeypatch.setattr(corpus, "_CHUNK_TEXTS", 1)
    again = corpus.build_token_store(TEXTS, tokenizer, tmp_path / "again", progress=False)
    other = corpus.build_token_store(TEXTS[:3], tokenizer, tmp_path / "other", progress=False)
    assert again.content_hash == store.content_hash != other.content_hash
    for file in store.store_dir.iterdir():
        assert file.read_bytes() == (again.store_dir / file.name).read_bytes()


def test_long_texts_are_chunked_by_characters(monkeypatch):
    monkeypatch.setattr(corpus, "_CHUNK_CHARACTERS", 10)
    sizes = [len(chunk) for chunk in corpus._chunks([("a", "x" * 12), ("b", "x"), ("c", "x" * 9), ("d", "x")])]
    assert sizes == [1, 2, 1]


def test_duplicate_ids_leave_no_store(tmp_path, tokenizer):
    with pytest.raises(InputError, match="1 duplicate ids; 'd1' is the id of texts 2 and 5"):
        corpus.build_token_store([*TEXTS, ("d1", "fox")], tokenizer, tmp_path / "store", progress=False)
    assert not list(tmp_path.iterdir())


def test_a_text_that_vanishes_in_tokenization_is_named_only_where_it_would_be_empty(tmp_path):
    texts = [("a", "12"), ("b", ""), ("c", "3")]
    with pytest.raises(InputError, match="nothing is left of the text b"):
        corpus.build_token_store(texts, OneByteTokenizer(), tmp_path / "store", progress=False)
    store = corpus.build_token_store(texts, OneByteTokenizer(suffix_ids=(9,)), tmp_path / "store", progress=False)
    assert store.pad(np.arange(3), 4, 4).tolist() == [[1, 2, 9, 0], [9, 0, 0, 0], [3, 9, 0, 0]]


def test_padding_inside_a_text_and_no_text_at_all_are_refused(tmp_path):
    with pytest.raises(InputError, match="the text b holds the padding token"):
        corpus.build_token_store([("a", "12"), ("b", "304")], OneByteTokenizer(), tmp_path / "store", progress=False)
    with pytest.raises(InputError, match="no text to tokenize"):
        corpus.build_token_store([], OneByteTokenizer(), tmp_path / "store", progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "ids.npy", "id_order.npy"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_stores_are_refused(store, name, damage):
    (store.store_dir / "checksums.json").unlink()
    file = store.store_dir / name
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InputError, match=rf"{name} .*(; remove the token store and build it again|does not exist)\.$"):
        corpus.open_token_store(store.store_dir)


def test_stores_without_manifest_or_of_another_format_are_refused(store):
    (store.store_dir / "checksums.json").unlink()
    manifest_file = store.store_dir / "manifest.json"
    manifest = json.loads(manifest_file.read_text())
    for change, message in [
        ({"format": "other"}, r"manifest\.json: format is 'other', expected 'de_jax token store 1'; remove the token store"),
        ({"num_texts": 3}, r"offsets\.npy holds int64 of shape .*, not int64 of shape \(4\)"),
        ({"vocab_size": None}, "vocab_size is None, expected a whole number"),
    ]:
        manifest_file.write_text(json.dumps(manifest | change))
        with pytest.raises(InputError, match=message):
            corpus.open_token_store(store.store_dir)
    manifest_file.write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        corpus.open_token_store(store.store_dir)
    manifest_file.unlink()
    with pytest.raises(InputError, match=r"holds no complete token store \(no manifest\.json\)"):
        corpus.open_token_store(store.store_dir)


def test_offsets_that_descend_are_refused(store):
    (store.store_dir / "checksums.json").unlink()
    offsets = np.load(store.store_dir / "offsets.npy")
    offsets[1], offsets[2] = offsets[2], offsets[1]
    np.save(store.store_dir / "offsets.npy", offsets)
    with pytest.raises(InputError, match=r"offsets\.npy or id_order\.npy is damaged"):
        corpus.open_token_store(store.store_dir)


@pytest.fixture
def texts_file(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"_id": i, "title": "fox", "text": one}) + "\n" for i, one in TEXTS))
    return file


def test_cached_store_is_not_tokenized_again(tmp_path, texts_file, tokenizer, monkeypatch):
    first = corpus.cached_token_store(texts_file, tokenizer, tmp_path / "cache", progress=False)

    def fail(texts):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(tokenizer, "encode", fail)
    again = corpus.cached_token_store(texts_file, tokenizer, tmp_path / "cache", progress=False)
    assert (again.store_dir, again.content_hash) == (first.store_dir, first.content_hash)


def test_cached_store_is_keyed_by_content_and_options(tmp_path, texts_file, tokenizer, spiece):
    cache = tmp_path / "cache"
    docs = corpus.cached_token_store(texts_file, tokenizer, cache, progress=False)
    queries = corpus.cached_token_store(texts_file, tokenizer, cache, kind="queries", progress=False)
    other = tokenizing.load_tokenizer(spiece)
    other.fingerprint = "another vocabulary"
    assert corpus.cached_token_store(texts_file, other, cache, progress=False).store_dir != docs.store_dir
    texts_file.write_text(texts_file.read_text().replace("seven", "eight"))
    changed = corpus.cached_token_store(texts_file, tokenizer, cache, progress=False)
    assert len({docs.content_hash, queries.content_hash, changed.content_hash}) == 3
    assert re.fullmatch(r"corpus-[0-9a-f]{16}", docs.store_dir.name)
    with pytest.raises(InputError, match="kind of texts is 'documents'"):
        corpus.cached_token_store(texts_file, tokenizer, cache, kind="documents")
    with pytest.raises(InputError, match="does not exist"):
        corpus.cached_token_store(tmp_path / "absent.tsv", tokenizer, cache)


def test_damaged_cached_store_is_built_again(tmp_path, texts_file, tokenizer):
    store = corpus.cached_token_store(texts_file, tokenizer, tmp_path / "cache", progress=False)
    tokens = store.tokens.copy()
    (store.store_dir / "ids.npy").unlink()
    again = corpus.cached_token_store(texts_file, tokenizer, tmp_path / "cache", progress=False)
    assert again.content_hash == store.content_hash
    np.testing.assert_array_equal(again.tokens, tokens)


def test_what_a_killed_build_left_is_cleared_away(tmp_path, texts_file, tokenizer):
    store = corpus.cached_token_store(texts_file, tokenizer, tmp_path / "cache", progress=False)
    name = store.store_dir.name
    store.store_dir.rename(tmp_path / "cache" / f".{name}.0123abcd.tmp")
    corpus.cached_token_store(texts_file, tokenizer, tmp_path / "cache", progress=False)
    assert sorted(file.name for file in (tmp_path / "cache").iterdir()) == [name]


BUILD_SLOWLY = """
import sys, time
from de_jax.data.stores import corpus
from de_jax.data.text import tokenizing
tokenizer = tokenizing.load_tokenizer(sys.argv[2])
encode, calls = tokenizer.encode, []
tokenizer.encode = lambda texts: calls.append(1) or time.sleep(0.5) or encode(texts)
store = corpus.cached_token_store(sys.argv[1], tokenizer, sys.argv[3], progress=False)
print(len(calls), store.content_hash)
"""


def test_processes_that_ask_at_once_build_one_store(tmp_path, texts_file, spiece):
    arguments = [sys.executable, "-c", BUILD_SLOWLY, str(texts_file), str(spiece), str(tmp_path / "cache")]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(calls for calls, _ in found) == ["0", "0", "1"]
    assert len({content_hash for _, content_hash in found}) == 1
