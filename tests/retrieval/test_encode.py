import json
import re
import threading
import time
import types
from concurrent import futures
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.data.stores.corpus import text_hashes
from de_jax.data.text.tokenizing import Side
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.static import StaticConfig
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig, segments_of
from de_jax.retrieval import corpus_embeddings, embedding_files, parts
from de_jax.retrieval import encode as encode_
from de_jax.retrieval.corpus_embeddings import encode_to_dir
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.retrieval.encode import encode, plan
from de_jax.training.mesh import sharding
from de_jax.training.mesh.sharding import state_shardings
from de_jax.training.run.run_folder import Run
from de_jax.types import InputError, TrainState


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
    return ListStore([rng.integers(1, 90, rng.integers(1, 75)).tolist() for _ in range(num_texts)], **options)


class CountingTower:
    """A sum and a mean over the real tokens; counts what it is given and what it compiles."""

    def __init__(self, fail_at=None):
        self.shapes, self.num_traces, self.fail_at = [], 0, fail_at

        @jax.jit
        def tower(tokens, lengths):
            self.num_traces += 1
            member = segments_of(lengths, tokens.shape[1])[:, None, :] == jnp.arange(1, lengths.shape[1] + 1)[None, :, None]
            total = jnp.sum(member * tokens[:, None, :], axis=2).astype(jnp.float32)  # [b, S]
            return jnp.stack([total, total / jnp.maximum(member.sum(axis=2), 1), member.sum(axis=2)], axis=2)

        self.tower = tower

    def __call__(self, tokens, lengths):
        if self.fail_at is not None and len(self.shapes) == self.fail_at:
            raise KeyboardInterrupt
        self.shapes.append((*tokens.shape, lengths.shape[1]))
        return self.tower(tokens, lengths)


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
    assert all(length % 16 == 0 and rows * length <= 512 for rows, length, _ in tower.shapes)
    assert len(set(tower.shapes)) == len({shape[1:] for shape in tower.shapes}) == tower.num_traces
    encode(tower, make_store(num_texts=91, seed=1), max_length=64, tokens_per_batch=512, length_multiple=16)
    widths = {shape[1:] for shape in tower.shapes}
    assert tower.num_traces == len(set(tower.shapes)) <= len(widths) + 2  # the last long batch and packed ones are trimmed


@pytest.mark.parametrize(("low", "high"), [(1, 257), (3, 16), (1, 33), (33, 34)])
def test_little_is_computed_beside_the_texts(low, high):
    lengths = np.random.default_rng(0).integers(low, high, 5000).astype(np.int32)
    batches = list(plan(lengths, tokens_per_batch=2048))
    assert sorted(np.concatenate([batch.positions for batch in batches])) == list(range(5000))
    assert sum(batch.num_rows * batch.row_length for batch in batches) < 1.15 * lengths.sum()
    for batch in batches:
        taken = np.bincount(batch.row, weights=lengths[batch.positions], minlength=batch.num_rows)
        assert len(taken) == batch.num_rows
        assert taken.max() <= batch.row_length
        assert batch.place.max() < batch.max_texts


def test_short_texts_have_one_shape():
    tower = CountingTower()
    store = ListStore([[row + 1] * size for row, size in enumerate(np.random.default_rng(0).integers(1, 33, 300))])
    np.testing.assert_allclose(encode(tower, store, max_length=64, tokens_per_batch=512), expected(store, 64), rtol=1e-6)
    assert set(tower.shapes) == {(8, 64, 16)}


@pytest.mark.parametrize(("lengths", "shape"), [([5], (1, 16)), ([17], (1, 32)), ([5, 5], (1, 64))])
def test_a_text_that_comes_alone_has_a_narrow_row(lengths, shape):
    assert [(batch.num_rows, batch.row_length) for batch in plan(np.array(lengths), tokens_per_batch=64)] == [shape]


def test_a_few_longer_texts_share_rows_with_short_ones():
    lengths = np.array([9] * 300 + [40, 33, 60], np.int32)
    batches = list(plan(lengths, tokens_per_batch=1024))
    assert {(batch.num_rows, batch.row_length) for batch in batches} == {(16, 64)}
    assert sum(batch.num_rows * batch.row_length for batch in batches) == 3 * 1024  # 2,833 tokens
    assert {300, 301, 302} <= set(np.concatenate([batch.positions for batch in batches]))


def test_work_is_dispatched_ahead_and_bounded(monkeypatch):
    dispatched, fetched, ahead = [], [], []

    class Result:
        def __init__(self, tokens, lengths):
            self.shape = (*lengths.shape, 2)
            dispatched.append(self)

        def __array__(self, dtype=None, copy=None):
            fetched.append(self)
            ahead.append(len(dispatched) - len(fetched))
            return np.zeros(self.shape, np.float32)

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


def test_cut_texts_are_told_also_of_embeddings_that_are_there(tmp_path):
    for _ in range(2):
        with pytest.warns(UserWarning, match="of the texts have more than max_length = 32 tokens"):
            to_dir(CountingTower(), make_store(), tmp_path)


@pytest.mark.parametrize("fail_at", [0, 1, 5, 12])
def test_an_interrupted_run_continues_to_equal_bytes(tmp_path, fail_at):
    store, tower = make_store(), CountingTower()
    to_dir(tower, store, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        to_dir(CountingTower(fail_at), store, tmp_path / "cut")
    with pytest.raises(InputError, match=r"no complete embeddings|cut does not exist"):
        open_embeddings(tmp_path / "cut")
    again, counts = CountingTower(), []
    to_dir(again, store, tmp_path / "cut", progress=counts.append)
    assert sum(counts) == store.num_texts
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    if fail_at == 12:
        assert len(again.shapes) < len(tower.shapes)


@pytest.mark.parametrize("is_same_order", [True, False])
@pytest.mark.parametrize("fail_at", [2, 5, 9])
def test_a_killed_call_continues_within_a_block(monkeypatch, tmp_path, fail_at, is_same_order):
    monkeypatch.setattr(embedding_files, "SECONDS_TO_KEEP", 0.0)
    store, tower = make_store(), CountingTower()
    to_dir(tower, store, tmp_path / "whole", texts_per_shard=100)
    with pytest.raises(KeyboardInterrupt):
        to_dir(CountingTower(fail_at), store, tmp_path / "cut", texts_per_shard=100)
    progress = tmp_path / "cut" / "progress.json"
    if not is_same_order and progress.exists():
        progress.write_text(re.sub('"kept": "[0-9a-f]{4}', '"kept": "none', progress.read_text()))
    num_kept = max(0, fail_at - encode_.BATCHES_AHEAD) if is_same_order else 0
    again, counts = CountingTower(), []
    to_dir(again, store, tmp_path / "cut", texts_per_shard=100, progress=counts.append)
    assert len(again.shapes) == len(tower.shapes) - num_kept
    assert sum(counts) == store.num_texts
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("total", [2, 3, 8])
def test_parts_in_any_order_with_a_kill_are_joined_to_equal_bytes(tmp_path, total):
    """Of eight parts, two have no texts."""
    store, whole, joined = make_store(), tmp_path / "whole", tmp_path / "joined"
    to_dir(CountingTower(), store, whole)
    every = [parts.Part(number, total) for number in range(total)]
    with pytest.raises(KeyboardInterrupt):
        to_dir(CountingTower(1), store, joined, part=every[-1])
    for part in reversed(every):
        if part != every[-1] and part.rows(57, 10):
            with pytest.raises(InputError, match=rf"joined\.parts lacks the shards .*{part.number}/{total}; run them"):
                to_dir(CountingTower(), store, joined)
        to_dir(CountingTower(), store, joined, part=part)
    joins = CountingTower()
    to_dir(joins, store, joined)
    assert (contents(joined), joins.shapes) == (contents(whole), [])
    to_dir(joins, store, joined, part=every[0])  # started again by a scheduler
    assert (contents(joined), joins.shapes) == (contents(whole), [])
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["joined", "whole"]


def with_copies():
    """57 texts, of which 20 occur twice or more often, in one shard or in several."""
    store, rng = make_store(37), np.random.default_rng(2)
    store.texts = [store.texts[row] for row in rng.permutation([*range(37), *rng.integers(0, 37, 20)])]
    store.ids, store.num_texts = [f"text {row}" for row in range(57)], 57
    return store


class NoisyTower(CountingTower):
    """As towers compute in float32: an embedding depends on its place in a row too."""

    def __call__(self, tokens, lengths):
        found = super().__call__(tokens, lengths)
        return found + jnp.arange(found.shape[1])[None, :, None] / 64 + len(self.shapes) / 8


@pytest.mark.parametrize("total", [1, 2, 3])
def test_equal_texts_have_equal_embeddings_in_memory_on_disk_and_by_parts(tmp_path, total):
    store, options = with_copies(), {"max_length": 32, "tokens_per_batch": 128}
    hashes, counts = text_hashes(store, 32), []
    in_memory = encode(NoisyTower(), store, progress=counts.append, **options)
    assert sum(counts) == 57
    whole = tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        to_dir(NoisyTower(fail_at=9), store, whole)
    to_dir(NoisyTower(), store, whole, progress=counts.append)
    assert sum(counts) == 2 * 57
    for part in range(total) if total > 1 else ():
        to_dir(NoisyTower(), store, tmp_path / "joined", part=parts.Part(part, total))
    to_dir(NoisyTower(), store, tmp_path / "joined")
    for embeddings in (in_memory, *(open_embeddings(tmp_path / name)[1] for name in ("whole", "joined"))):
        for text in np.unique(hashes):
            assert len(np.unique(embeddings[hashes == text], axis=0)) == 1
        assert (np.abs(embeddings).sum(axis=1) > 0).all()


@pytest.mark.parametrize("total", [2, 3])
def test_parts_with_copies_are_joined_to_the_bytes_of_one_job(tmp_path, total):
    store = with_copies()
    to_dir(CountingTower(), store, tmp_path / "whole")
    for part in range(total):
        to_dir(CountingTower(), store, tmp_path / "joined", part=parts.Part(part, total))
    to_dir(CountingTower(), store, tmp_path / "joined")
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")


def test_parts_by_two_models_are_not_joined(tmp_path):
    for part, model in ((parts.Part(0, 2), "model"), (parts.Part(1, 2), "another")):
        to_dir(CountingTower(), make_store(), tmp_path / "out", part=part, model_hash=model)
    with pytest.raises(InputError, match=r"out\.parts/1_of_2 was begun with model 'another', not 'model'"):
        to_dir(CountingTower(), make_store(), tmp_path / "out")


def test_parts_by_another_model_than_the_joining_calls_are_refused(tmp_path):
    for number in range(2):
        to_dir(CountingTower(), make_store(), tmp_path / "out", part=parts.Part(number, 2), model_hash="another")
    with pytest.raises(InputError, match="model 'another', not 'model'"):
        to_dir(CountingTower(), make_store(), tmp_path / "out")


def test_parts_of_two_splits_are_refused(tmp_path):
    for total in (2, 3):
        to_dir(CountingTower(), make_store(), tmp_path / "out", part=parts.Part(0, total))
    with pytest.raises(InputError, match=r"out\.parts holds shards of 2 and of 3; remove those of one split"):
        to_dir(CountingTower(), make_store(), tmp_path / "out")


@pytest.mark.parametrize("text", ["4/4", "1", "-1/4", "a/b", "0/0", "1/4 "])
def test_what_names_no_part_is_refused(text):
    with pytest.raises(InputError, match="give its number from 0 and how many there are"):
        parts.Part.of(text)


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


def test_of_two_that_write_one_folder_the_second_waits_and_finds_it_complete(tmp_path):
    store, towers, has_begun = make_store(), (CountingTower(), CountingTower()), threading.Event()

    def first(*batch):
        has_begun.set()
        time.sleep(0.02)
        return towers[0](*batch)

    def second():
        has_begun.wait()
        to_dir(towers[1], store, tmp_path / "out")

    def both():
        with futures.ThreadPoolExecutor() as pool:
            for done in [pool.submit(to_dir, first, store, tmp_path / "out"), pool.submit(second)]:
                done.result(timeout=60)

    with pytest.warns(match=r"another process is writing .*/out; this one waits for it\."):
        both()
    assert towers[1].shapes == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no lock
    np.testing.assert_allclose(open_embeddings(tmp_path / "out")[1], expected(store, 32), rtol=1e-6)


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
    with pytest.raises(InputError, match="exists already and holds"):
        to_dir(CountingTower(), make_store(), tmp_path)
    assert (tmp_path / "embeddings.npy").read_text() == "somebody's"


def test_damaged_embeddings_are_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "second"):
        to_dir(CountingTower(), make_store(), folder)
        (folder / "checksums.json").unlink()
    with open(tmp_path / "embeddings.npy", "r+b") as file:
        file.truncate(500)
    with pytest.raises(InputError, match=r"embeddings\.npy (is no \.npy file|has \d+ bytes)"):
        open_embeddings(tmp_path)
    (tmp_path / "second" / "ids.json").write_text(json.dumps(["only one"]))
    with pytest.raises(InputError, match="holds 1 ids"):
        open_embeddings(tmp_path / "second")


def small_run(mesh=None):
    tower = TowerConfig(
        T5Config(vocab_size=96, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32, dtype="float32"), projection_dim=8
    )
    model = DualEncoder(tower, tower)
    params = jax.jit(model.init)(jax.random.key(0))
    if mesh is not None:
        state = TrainState(jnp.zeros((), jnp.int32), params, (), jnp.zeros(2, jnp.uint32))
        params = jax.device_put(params, state_shardings(state, mesh).params)
    tokenizer = types.SimpleNamespace(vocab_size=96)  # texts come as tokens
    return Run(Path("run"), 0, model, params, Side(tokenizer, 16), Side(tokenizer, 32))


def test_a_static_model_needs_few_programs():
    tower = TowerConfig(StaticConfig(vocab_size=96, model_dim=8), projection_dim=None)
    run = small_run()._replace(model=DualEncoder(tower, tower))
    run = run._replace(params=jax.jit(run.model.init)(jax.random.key(0)))
    store, program = make_store(num_texts=400), encode_._jitted(run.model, "doc", sharding.make_mesh())
    found = encode_.docs(run, store, max_length=64, tokens_per_batch=512)
    assert program._cache_size() <= encode_.WIDTHS_OF_TABLE + 2  # and packed ones, and a last batch
    (table,) = jax.tree.leaves(run.params)
    mean = np.stack([np.asarray(table)[text[:64]].mean(axis=0) for text in store.texts])
    np.testing.assert_allclose(found, mean / np.linalg.norm(mean, axis=1, keepdims=True), atol=1e-5)


def test_rows_are_split_over_all_devices_and_give_what_one_device_gives():
    run, store = small_run(), make_store()
    alone = jax.jit(lambda tokens, lengths: run.model.encode_rows("doc", run.params, tokens, lengths=lengths))
    one = encode(alone, store, max_length=32)
    np.testing.assert_allclose(encode_.docs(run, store), one, atol=1e-6)
    tokens = make_store().pad(np.arange(5), 32, 32)  # fewer texts than devices
    found = encode_.encode_fn(run, "doc")(tokens, store.lengths(32)[:5, None])
    assert found.shape == (5, 1, 8)
    np.testing.assert_allclose(found[:, 0], one[:5], atol=1e-6)
    # One eighth of the work each; with copies of the parameters alone, every device would do all of it.
    text = (
        encode_._jitted(run.model, "doc", sharding.make_mesh())
        .lower(
            jax.device_put(run.model.inference_params(run.params, "doc"), sharding.replicated(sharding.make_mesh())),
            jax.ShapeDtypeStruct((64, 32), np.int32, sharding=sharding.by_rows(sharding.make_mesh())),
            jax.ShapeDtypeStruct((64, 1), np.int32, sharding=sharding.by_rows(sharding.make_mesh())),
        )
        .compile()
        .as_text()
    )
    assert "f32[8,32,16]" in text
    assert "f32[64,32,16]" not in text


def test_a_run_in_training_encodes_on_its_own_mesh():
    store = make_store()
    whole, split = small_run(), small_run(sharding.make_mesh(2, 2, 2))
    assert split.params["shared"]["embedder"]["embedding"].addressable_shards[0].data.shape == (24, 16)
    np.testing.assert_allclose(encode_.queries(split, store), encode_.queries(whole, store), atol=1e-6)


def test_of_a_corpus_that_changed_only_new_texts_are_encoded(tmp_path):
    run = small_run()._replace(run_dir=tmp_path)
    store, counts = make_store(num_texts=40), []
    before = open_embeddings(corpus_embeddings.cached_docs(run, store, "corpus"))[1]
    texts = [store.texts[7], [5, 6, 7], *store.texts[20:], [8] * 70]
    changed = ListStore(texts, content_hash="changed")
    encoded = []

    def counting(encode_fn, store, *, rows, **options):
        encoded.append(len(rows))
        return encode(encode_fn, store, rows=rows, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encode_, "encode", counting)
        after = open_embeddings(corpus_embeddings.cached_docs(run, changed, "corpus", progress=counts.append))[1]
        assert encoded == [2]
        assert sum(counts) == len(texts)
        corpus_embeddings.cached_docs(run, ListStore(store.texts[:9], "part"), "corpus")
        assert encoded == [2]  # nothing is new
        corpus_embeddings.cached_docs(run, ListStore(store.texts[:9], "part"), "corpus", max_length=8)
        assert encoded == [2, 9]  # cut elsewhere, they are other texts
    np.testing.assert_array_equal(after[[0, *range(2, 22)]], before[[7, *range(20, 40)]])
    np.testing.assert_allclose(after, encode_.docs(run, changed), atol=1e-6)


def test_texts_that_differ_in_one_token_its_place_or_what_is_cut_off_have_other_hashes():
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 30000, 60).tolist() for _ in range(2000)]
    changed = [text.copy() for text in texts]
    for number, text in enumerate(changed):
        place = number % 59
        text[place : place + 2] = text[place : place + 2][::-1] if number % 2 else [text[place] + 1, text[place + 1]]
    hashes = text_hashes(ListStore(texts + changed), 64)
    distinct = {tuple(text) for text in texts + changed}
    assert len(np.unique(hashes)) == len(distinct) > 3900
    np.testing.assert_array_equal(text_hashes(ListStore(texts[:50]), 20), text_hashes(ListStore([t[:20] for t in texts[:50]]), 64))


@pytest.mark.parametrize(
    ("num_texts", "length", "most"), [(100, 10, 1.3), (3, 10, 2.2), (1, 200, 1.1), (4, 200, 1.1), (330, 11, 1.25)]
)
def test_a_few_texts_fill_their_batches_and_have_one_shape(num_texts, length, most):
    """Of 100 queries of 10 tokens, the second batch was nearly empty: 2.01 times their tokens were computed."""
    batches = list(plan(np.full(num_texts, length, np.int32), tokens_per_batch=1024))
    assert len({(batch.num_rows, batch.row_length) for batch in batches}) == 1
    assert all(batch.num_rows * batch.row_length <= 1024 for batch in batches)
    computed = sum(batch.num_rows * batch.row_length for batch in batches)
    assert computed <= max(most * num_texts * length, 2 * 64)
    assert sorted(np.concatenate([batch.positions for batch in batches]).tolist()) == list(range(num_texts))


def test_what_is_cut_is_said_once_for_all_shards(tmp_path):
    run, store = small_run()._replace(run_dir=tmp_path), ListStore([[3] * 100] * 2 + [[4, number] for number in range(6)], "long")
    with pytest.warns(UserWarning, match="25 % of the texts have more than max_length = .* are cut") as said:
        corpus_embeddings.cached_docs(run, store, "corpus", texts_per_shard=2)
    assert len(said) == 1
