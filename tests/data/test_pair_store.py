"""Folders of pairs, written here by hand: nothing in this file needs TensorFlow."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from flat_settings import flat

from de_jax.data.sources import pair_store, pair_writer
from de_jax.types import PADDING_ID, InputError

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


def columns(tokenizer, **texts):
    """One chunk of examples."""
    return {name: tokenizer.encode(values) if name in ("query", "doc") else values for name, values in texts.items()}


def pair_source(tokenizer, name="pairs", rate=1.0, **changes):
    chunk = columns(
        tokenizer,
        **{
            "query_id": [f"q{i}" for i in range(9)],
            "query": [f"the {word}" for word in WORDS],
            "doc_id": [f"d{i // 2}" for i in range(9)],
            "doc": [f"a {WORDS[i // 2]}" for i in range(9)],
            "neg_doc_ids": [[f"d{j}" for j in range(5) if j != i // 2][: i % 3] for i in range(9)],
            **changes,
        },
    )
    return pair_writer.PairSource(name, rate, lambda: iter([chunk]), {"query": None, "doc": None})


def write(folder, tokenizer, sources, dev=(), **options):
    return pair_writer.write(folder, sources, dev, {"query": tokenizer, "doc": tokenizer}, made_from="test", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("pairs") / "store"
    write(folder, tokenizer, [pair_source(tokenizer)], [pair_source(tokenizer, relevance=np.arange(1, 10))])
    return folder


def test_texts_that_are_in_many_pairs_are_stored_once(folder, tokenizer):
    store = pair_store.open_pair_store(folder)
    assert list(store.doc_store.ids) == ["d0", "d1", "d2", "d3", "d4"]
    assert store.pairs.tolist() == [[i, i // 2] for i in range(9)]
    assert store.neg_docs[:3].tolist() == [[PADDING_ID, PADDING_ID], [1, PADDING_ID], [0, 2]]
    assert store.neg_queries is None
    assert store.dev_qrels["q3"] == {"d1": 4}
    assert store.doc_store.pad(np.array([1]), 8, 8)[0].tolist()[: 1 + len(tokenizer.encode(["a quick"])[0])] == [
        *tokenizer.encode(["a quick"])[0].tolist(),
        1,
    ]


def test_identical_ids_are_dropped_from_dev_scores_and_negatives_unless_kept(tokenizer, tmp_path, recwarn):
    same = pair_source(tokenizer, query_id=["d0", *(f"q{i}" for i in range(1, 9))], relevance=np.ones(9, np.int64))
    write(tmp_path / "same", tokenizer, [same], [same])
    found = []
    for options in ({}, {"keep_identical_ids": True}):
        data = flat(pair_store.stored_pairs)(pairs_dir=str(tmp_path / "same"), batch_size=3, **options)
        found.append((data.dev.drop_identical_ids, data.texts.drop_identical_ids))
    assert found == [(True, True), (False, False)]
    (said,) = [str(one.message) for one in recwarn if "judgements dropped" in str(one.message)]
    assert "its query: 1 (d0); " in said
    assert said.endswith("; keep_identical_ids ranks them.")


def test_empty_texts_are_refused_or_left_out_with_their_pairs_and_counted(tokenizer, tmp_path, recwarn):
    texts = [" " if i == 2 else f"a {word}" for i, word in enumerate(WORDS)]
    holes = pair_source(
        tokenizer,
        query=[" " if i == 4 else f"the {word}" for i, word in enumerate(WORDS)],
        doc_id=[f"d{i}" for i in range(9)],
        doc=texts,
        neg_doc_ids=[["d2", "d8"], *[["d2"]] * 8],
    )
    with pytest.raises(InputError, match=r"the text of q4 is empty; remove it, or set skip_empty\."):
        write(tmp_path / "refused", tokenizer, [holes])
    store = write(tmp_path / "kept", tokenizer, [holes], [holes], skip_empty=True)
    data = flat(pair_store.stored_pairs)(pairs_dir=str(tmp_path / "kept"), batch_size=3)
    said = {str(one.message) for one in recwarn if "left out" in str(one.message)}
    assert {sentence.partition(" left out")[2] for sentence in said} == {
        ": 1 (q4).",
        ": 1 (d2).",
        ", as their query or document is an empty text: 2.",
    }
    assert [(store.query_store.ids[query], store.doc_store.ids[doc]) for query, doc in store.pairs.tolist()] == [
        (f"q{i}", f"d{i}") for i in range(9) if i not in (2, 4)
    ]
    assert [store.doc_store.ids[row] for row in store.neg_docs[0].tolist()] == ["d8"]
    assert (store.neg_docs[1:] == PADDING_ID).all()
    assert data.dev.qrels["q2"] == {"d2": 1}  # it counts as not found
    assert "q4" not in {data.query_ids[row] for row in data.dev.query_rows.tolist()}


def test_negatives_are_drawn_from_a_rows_own_and_again_in_the_next_epoch(folder):
    data = flat(pair_store.stored_pairs)(pairs_dir=str(folder), batch_size=3, num_neg_docs=1, unique_in_batch=False, pack=False)
    stream = list(itertools.islice(data.batches(0), 60))
    mined = pair_store.open_pair_store(folder).neg_docs
    drawn = {}
    for batch in stream:
        for query, negative in zip(batch.query_id.tolist(), batch.neg_doc_ids[:, 0].tolist(), strict=True):
            drawn.setdefault(query, set()).add(negative)
    # all that a row has come up; padding where it has none
    assert drawn == {row: {one for one in mined[row].tolist() if one != PADDING_ID} or {PADDING_ID} for row in range(9)}
    for batch in stream[:3]:
        assert (batch.neg_docs[batch.neg_doc_ids == PADDING_ID] == 0).all()
    again = next(data.batches(41))
    np.testing.assert_array_equal(again.neg_doc_ids, stream[41].neg_doc_ids)
    none = next(flat(pair_store.stored_pairs)(pairs_dir=str(folder), batch_size=3, num_neg_docs=0).batches(0))
    assert none.neg_docs is None


def test_packed_negatives_are_the_padded_ones_and_padding_is_a_text_without_tokens(folder):
    padded, packed = (
        next(flat(pair_store.stored_pairs)(pairs_dir=str(folder), batch_size=4, num_neg_docs=2, pack=pack).batches(7))
        for pack in (False, True)
    )
    np.testing.assert_array_equal(packed.neg_doc_ids, padded.neg_doc_ids)
    assert (packed.neg_doc_ids == PADDING_ID).any()
    texts = packed.neg_docs
    starts = (np.cumsum(texts.lengths, axis=1) - texts.lengths).reshape(-1)
    for slot, expected in zip(texts.slots.reshape(-1), padded.neg_docs.reshape(8, -1), strict=True):
        row, length = slot // texts.lengths.shape[1], texts.lengths.reshape(-1)[slot] if slot >= 0 else 0
        assert texts.tokens[row, starts[slot] : starts[slot] + length].tolist() == expected[expected != 0].tolist()


def test_sources_that_use_one_id_for_different_texts_are_kept_apart(tokenizer, tmp_path):
    other = pair_source(tokenizer, "other", 2.0, query=[f"over {word}" for word in WORDS], neg_doc_ids=[["d0"]] * 9)
    store = write(tmp_path / "two", tokenizer, [pair_source(tokenizer), other])
    assert (store.query_store.num_texts, store.doc_store.num_texts) == (18, 10)
    assert store.query_store.ids[9] == "other/q0"
    assert store.neg_docs[9:].tolist() == [[5, PADDING_ID]] * 9
    assert [tuple(part) for part in store.parts] == [("pairs", 1.0, 9), ("other", 2.0, 9)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"neg_doc_ids": [["d9"]] * 9}, r"pairs: values of neg_doc_ids that have no text: 1 \(d9\)"),
        ({"doc": [f"a {word}" for word in WORDS]}, "the id 'd0' names two different texts"),
        ({"query_id": [], "query": [], "doc_id": [], "doc": [], "neg_doc_ids": []}, "pairs yields no pair"),
    ],
)
def test_sources_that_do_not_fit_together_leave_no_folder(changes, message, tokenizer, tmp_path):
    with pytest.raises(InputError, match=message):
        write(tmp_path / "store", tokenizer, [pair_source(tokenizer, **changes)])
    assert not any(tmp_path.iterdir())


def test_a_prompt_that_a_folder_was_not_written_with_is_refused(folder):
    with pytest.raises(InputError, match=r"query_prompt is 'ask: ', but the texts .* were tokenized with ''; leave"):
        flat(pair_store.stored_pairs)(pairs_dir=str(folder), batch_size=3, query_prompt="ask: ")


def test_tokens_beyond_the_vocabulary_are_refused(tokenizer, tmp_path):
    source = pair_source(tokenizer)
    chunk = next(source.chunks())
    chunk["query"][4] = np.array([tokenizer.vocab_size], np.int32)
    with pytest.raises(InputError, match=f"the text q4 holds the token {tokenizer.vocab_size}, and the vocabulary has"):
        write(tmp_path / "store", tokenizer, [source._replace(chunks=lambda: iter([chunk]))])


def test_what_is_no_whole_folder_is_refused(tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"stored_pairs\.pairs_dir is not set"):
        flat(pair_store.stored_pairs)()
    with pytest.raises(InputError, match="holds no complete pair store"):
        flat(pair_store.stored_pairs)(pairs_dir=str(tmp_path))
    write(tmp_path / "store", tokenizer, [pair_source(tokenizer)])
    (tmp_path / "store" / "checksums.json").unlink()
    manifest = tmp_path / "store" / "manifest.json"
    whole = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(whole | {"parts": [["pairs", 1.0, 8]]}))
    with pytest.raises(InputError, match=r"manifest\.json: parts/0 is .*, expected an object"):
        pair_store.open_pair_store(tmp_path / "store")
    manifest.write_text(json.dumps(whole | {"format": "other"}))
    with pytest.raises(InputError, match=r"manifest\.json: format is 'other', expected 'de_jax pair store 1'"):
        pair_store.open_pair_store(tmp_path / "store")
    manifest.write_text(json.dumps(whole))
    np.save(tmp_path / "store" / "pairs.npy", np.full((9, 2), 9, np.int32))
    with pytest.raises(InputError, match=r"pairs\.npy is damaged: it refers to a missing text"):
        pair_store.open_pair_store(tmp_path / "store")
    (tmp_path / "store" / "pairs.npy").write_bytes(b"")
    with pytest.raises(InputError, match=r"pairs\.npy is no \.npy file or is damaged"):
        pair_store.open_pair_store(tmp_path / "store")


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_training_data_from_a_folder_loads_no_tensorflow(folder):
    code = (
        "import sys\nfrom de_jax.data.sources.options import PairsOptions\n"
        "from de_jax.data.sources.pair_store import stored_pairs\n"
        f"batch = next(stored_pairs({str(folder)!r}, options=PairsOptions(batch_size=4)).batches(2))\n"
        "print(batch.query_id.tolist(), sorted({'tensorflow', 'seqio', 'jax'} & set(sys.modules)))"
    )
    expected = next(flat(pair_store.stored_pairs)(pairs_dir=str(folder), batch_size=4).batches(2)).query_id.tolist()
    done = run(code)
    assert done.stdout.splitlines() == [f"{expected} []"], done.stderr


def test_a_machine_without_seqio_is_told_what_to_install():
    code = (
        "import sys; sys.modules['seqio'] = None\n"
        "from de_jax.data.sources.seqio_batches import seqio_pairs\n"
        "from de_jax.types import InputError\n"
        "try: seqio_pairs('t')\n"
        "except InputError as error: print(error)"
    )
    done = run(code)
    sentence = "a seqio task needs the package seqio; run pip install 'de-jax-retrieval[seqio]'."
    assert done.stdout.splitlines() == [sentence], done.stderr
