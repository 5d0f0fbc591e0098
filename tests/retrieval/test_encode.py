import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.retrieval import encode as encode_
from de_jax.retrieval.encode import encode, encode_to_dir, open_embeddings, plan
from de_jax.types import InputError


class ListStore:
    """A token store of python lists."""

    def __init__(self, texts, content_hash="texts"):
        self.texts, self.content_hash, self.tokenizer_fingerprint = texts, content_hash, "vocabulary"
        self.ids = [f"text {row}" for row in range(len(texts))]
        self.num_texts = len(texts)

    def lengths(self, max_length):
        return np.array([min(len(text), max_length) for text in self.texts], np.int32)

    def pad(self, rows, max_length, pad_to):
        padded = np.zeros((len(rows), pad_to), np.int32)
        for row, text in zip(padded, (self.texts[row][:max_length] for row in rows), strict=True):
            row[: len(text)] = text
        return padded


def make_store(num_texts=57, seed=0, **options):
    rng = np.random.default_rng(seed)
    return ListStore([rng.integers(1, 90, rng.integers(1, 45)).tolist() for _ in range(num_texts)], **options)


class CountingTower:
    """A sum and a mean over the real tokens; counts what it is given and what it compiles."""

    def __init__(self, fail_at=None):
        self.shapes, self.num_traces, self.fail_at = [], 0, fail_at

        @jax.jit
        def tower(tokens):
            self.num_traces += 1
            real = (tokens > 0).astype(jnp.float32)
            total = tokens.sum(axis=1).astype(jnp.float32)
            return jnp.stack([total, total / jnp.maximum(real.sum(axis=1), 1), real.sum(axis=1)], axis=1)

        self.tower = tower

    def __call__(self, tokens):
        if self.fail_at is not None and len(self.shapes) == self.fail_at:
            raise KeyboardInterrupt
        self.shapes.append(tokens.shape)
        return self.tower(tokens)


def expected(store, max_length):
    texts = [text[:max_length] for text in store.texts]
    return np.array([[sum(text), sum(text) / len(text), len(text)] for text in texts], np.float32)


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 256, 100000])
@pytest.mark.parametrize("max_length", [7, 64])
def test_encode_gives_each_text_its_embedding_in_store_order(tokens_per_batch, max_length):
    store = make_store()
    found = encode(CountingTower(), store, max_length=max_length, tokens_per_batch=tokens_per_batch, length_multiple=16)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(store, max_length), rtol=1e-6)


def test_encode_takes_chosen_rows_in_their_order():
    store, rows = make_store(), np.array([30, 2, 2, 56])
    found = encode(CountingTower(), store, max_length=64, rows=rows)
    np.testing.assert_allclose(found, expected(store, 64)[rows], rtol=1e-6)


def test_each_padded_length_has_one_shape_and_compiles_once():
    tower, store = CountingTower(), make_store(num_texts=200)
    encode(tower, store, max_length=64, tokens_per_batch=512, length_multiple=16)
    assert all(length % 16 == 0 and rows * length <= 512 for rows, length in tower.shapes)
    assert len(set(tower.shapes)) == len({length for _, length in tower.shapes}) == tower.num_traces
    encode(tower, make_store(num_texts=91, seed=1), max_length=64, tokens_per_batch=512, length_multiple=16)
    assert tower.num_traces == len({length for _, length in tower.shapes})


def test_sorting_by_length_leaves_little_padding():
    lengths = np.random.default_rng(0).integers(1, 257, 5000)
    batches = list(plan(lengths, tokens_per_batch=2048, length_multiple=32))
    assert sorted(np.concatenate([batch.positions for batch in batches])) == list(range(5000))
    assert sum(batch.num_rows * batch.length for batch in batches) < 1.2 * lengths.sum()


def test_work_is_dispatched_ahead_and_bounded(monkeypatch):
    dispatched, fetched, ahead = [], [], []

    class Result:
        def __init__(self, tokens):
            self.tokens = tokens
            dispatched.append(self)

        def __array__(self, dtype=None, copy=None):
            fetched.append(self)
            ahead.append(len(dispatched) - len(fetched))
            return np.zeros((len(self.tokens), 2), np.float32)

    encode(Result, make_store(), max_length=64, tokens_per_batch=64)
    assert len(dispatched) == len(fetched) > 2 * encode_.BATCHES_AHEAD
    assert max(ahead) == encode_.BATCHES_AHEAD


def test_progress_counts_every_text_once():
    counts = []
    encode(CountingTower(), make_store(), max_length=64, tokens_per_batch=256, progress=counts.append)
    assert sum(counts) == 57


def test_an_empty_store_and_senseless_sizes_are_refused():
    with pytest.raises(InputError, match="no text to encode"):
        encode(CountingTower(), ListStore([]), max_length=8)
    with pytest.raises(InputError, match="tokens_per_batch is 0"):
        encode(CountingTower(), make_store(), max_length=8, tokens_per_batch=0)


def to_dir(tower, store, out_dir, **options):
    options = {"max_length": 32, "model_hash": "model", "tokens_per_batch": 128, "texts_per_shard": 10, **options}
    encode_to_dir(tower, store, out_dir, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_embeddings_on_disk_are_those_in_memory(tmp_path):
    store = make_store()
    to_dir(CountingTower(), store, tmp_path / "out")
    ids, embeddings, manifest = open_embeddings(tmp_path / "out")
    assert ids == store.ids
    assert isinstance(embeddings, np.memmap)
    np.testing.assert_allclose(embeddings, expected(store, 32), rtol=1e-6)
    assert (manifest["model"], manifest["num_texts"], manifest["dim"], manifest["max_length"]) == ("model", 57, 3, 32)


@pytest.mark.parametrize("fail_at", [0, 1, 5, 12])
def test_an_interrupted_run_continues_to_equal_bytes(tmp_path, fail_at):
    store, tower = make_store(), CountingTower()
    to_dir(tower, store, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        to_dir(CountingTower(fail_at), store, tmp_path / "cut")
    with pytest.raises(InputError, match="no complete embeddings"):
        open_embeddings(tmp_path / "cut")
    again, counts = CountingTower(), []
    to_dir(again, store, tmp_path / "cut", progress=counts.append)
    assert sum(counts) == store.num_texts
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    if fail_at == 12:
        assert len(again.shapes) < len(tower.shapes)


def test_a_shard_written_but_not_counted_is_written_again(tmp_path):
    store = make_store()
    to_dir(CountingTower(), store, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        to_dir(CountingTower(12), store, tmp_path / "cut")
    with open(tmp_path / "cut" / "embeddings.npy", "ab") as file:
        file.write(b"half a row")
    to_dir(CountingTower(), store, tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_complete_folder_is_left_alone(tmp_path):
    to_dir(CountingTower(), make_store(), tmp_path / "out")
    tower = CountingTower()
    to_dir(tower, make_store(), tmp_path / "out", tokens_per_batch=512)
    assert tower.shapes == []


@pytest.mark.parametrize("fail_at", [12, None])
@pytest.mark.parametrize(
    ("change", "message"),
    [({"model_hash": "other"}, "model 'model', not 'other'"), ({"max_length": 16}, "max_length 32, not 16"), ({}, "store 'texts'")],
)
def test_a_folder_of_another_model_or_store_is_refused(tmp_path, fail_at, change, message):
    try:
        to_dir(CountingTower(fail_at), make_store(), tmp_path / "out")
    except KeyboardInterrupt:
        assert fail_at is not None
    before = contents(tmp_path / "out")
    store = make_store() if change else make_store(content_hash="other texts")
    with pytest.raises(InputError, match=message):
        to_dir(CountingTower(), store, tmp_path / "out", **change)
    assert contents(tmp_path / "out") == before


def test_a_run_does_not_continue_with_other_batches(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        to_dir(CountingTower(12), make_store(), tmp_path / "out")
    with pytest.raises(InputError, match="tokens_per_batch 128, not 64"):
        to_dir(CountingTower(), make_store(), tmp_path / "out", tokens_per_batch=64)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "embeddings.npy").write_text("somebody's")
    with pytest.raises(InputError, match="holds something else"):
        to_dir(CountingTower(), make_store(), tmp_path)
    assert (tmp_path / "embeddings.npy").read_text() == "somebody's"


def test_damaged_embeddings_are_refused(tmp_path):
    to_dir(CountingTower(), make_store(), tmp_path)
    with open(tmp_path / "embeddings.npy", "r+b") as file:
        file.truncate(500)
    with pytest.raises(InputError, match=r"embeddings\.npy cannot be read"):
        open_embeddings(tmp_path)
    (tmp_path / "ids.json").write_text(json.dumps(["only one"]))
    to_dir(CountingTower(), make_store(), tmp_path / "second")
    (tmp_path / "second" / "ids.json").write_text(json.dumps(["only one"]))
    with pytest.raises(InputError, match="holds 1 ids"):
        open_embeddings(tmp_path / "second")
