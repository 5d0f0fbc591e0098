"""Rows of texts to pretrain on: which tokens they hold, what of them follows from the seed, and what is refused."""

import functools

import numpy as np
import pytest
from letters import Letters
from pretrained_folders import write_tokenizer

from de_jax.data.sources.options import Share
from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.data.text.vocabulary_training import train_wordpiece
from de_jax.types import InputError
from reproduction import corruption
from reproduction.texts import TextsOptions, masked_tokens, span_corruption

ALPHABET = "abcdefghijklmnopqrstuvwxy"


class Ended(Letters):
    """Texts end with 1 and begin with nothing, as T5's do."""

    prefix_ids = ()


class Masked(Letters):
    mask_id = 27


@pytest.fixture
def options(tmp_path):
    """40 texts of 25 letters, no two neighbours alike, in two files."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{row}\t{ALPHABET}\n" for row in range(20)))
    texts = (str(tmp_path / "one.tsv"), str(tmp_path / "two.tsv"))
    return functools.partial(TextsOptions, texts=texts, batch_size=4, max_length=24, cache_dir=str(tmp_path / "cache"))


def first(data, number=1, start=0):
    return [batch for _, batch in zip(range(number), data.batches(start), strict=False)]


def test_inputs_and_targets_together_are_the_text(options):
    data = span_corruption(options=options(tokenizer=Ended()))
    assert (data.vocab_size, data.num_tokens) == (129, 1000)
    lengths = corruption.span_lengths(24, noise_density=0.15, mean_span_length=3.0)
    assert data.batches_per_epoch == (1000 - lengths.text + 1) // lengths.text // 4
    (batch,) = first(data)
    assert batch.doc.shape == (4, lengths.inputs)
    assert batch.query.shape == (4, lengths.targets)
    for inputs, targets, text in zip(batch.doc.tolist(), batch.query.tolist(), batch.doc_id, strict=True):
        assert inputs.pop() == targets.pop() == 1
        spans = {}
        for token in targets:
            if token >= 29:
                spans[token] = hidden = []
            else:
                hidden.append(token)
        assert list(spans) == [128 - number for number in range(lengths.num_spans)]
        whole = [token for found in inputs for token in (spans[found] if found >= 29 else [found])]
        start = whole[0] - 2
        assert whole == [2 + (start + place) % 25 for place in range(lengths.text)]
        assert data.doc_ids[int(text)].split("/")[0] in ("0", "1")


def test_masked_rows_tell_what_stood_there(options):
    data = masked_tokens(options=options(tokenizer=Masked()))
    (batch,) = first(data)
    assert batch.tokens.shape == (4, 24)
    assert batch.places.shape == batch.targets.shape == (4, 3)
    assert set(batch.tokens[:, 0]) == {28}
    assert set(batch.tokens[:, -1]) == {1}
    for tokens, places, targets in zip(batch.tokens, batch.places, batch.targets, strict=True):
        tokens[places] = targets
        assert tokens[1:-1].tolist() == [2 + (tokens[1] - 2 + place) % 25 for place in range(22)]


@pytest.mark.parametrize(("source", "tokenizer"), [(span_corruption, Ended()), (masked_tokens, Masked())])
def test_rows_follow_from_seed_step_and_row_alone(options, source, tokenizer):
    whole = first(source(options=options(tokenizer=tokenizer, seed=3)), 14)
    np.testing.assert_equal(first(source(options=options(tokenizer=tokenizer, seed=3)), 1, start=13), whole[13:])
    hosts = [Share(host_index=host, num_hosts=2) for host in range(2)]
    parts = [first(source(options=options(tokenizer=tokenizer, seed=3), share=host), 14)[13] for host in hosts]
    for of_hosts, of_all in zip(zip(*parts, strict=True), whole[13], strict=True):
        if of_all is not None:
            np.testing.assert_array_equal(np.concatenate(of_hosts), of_all)
    other = first(source(options=options(tokenizer=tokenizer, seed=4)))[0]
    assert (whole[0].doc_id != other.doc_id).any()


def test_an_epoch_has_every_chunk_once_and_the_next_has_others(options):
    data = masked_tokens(options=options(tokenizer=Masked(), max_length=12, batch_size=11))
    number = data.batches_per_epoch
    assert number == 9
    epochs = [first(data, number, start=epoch * number) for epoch in range(2)]
    texts = [sorted(int(row) for batch in epoch for row in batch.doc_id) for epoch in epochs]
    for rows in texts:  # of ten letters, of texts of 25: every text begins two or three, none is left out
        assert set(rows) == set(range(40)) or len(rows) == 99
        assert max(rows.count(row) for row in rows) <= 3
    assert any((a.tokens != b.tokens).any() for a, b in zip(*epochs, strict=True))


@pytest.mark.parametrize(
    ("source", "changes", "sentence"),
    [
        (span_corruption, {"tokenizer": Letters()}, "must put an end after a text and nothing before it"),
        (masked_tokens, {"tokenizer": Ended()}, r"no token \[MASK\] or <mask>"),
        (span_corruption, {"tokenizer": Ended(), "max_length": 2}, "max_length is 2, which leaves no room"),
        (masked_tokens, {"tokenizer": Masked(), "max_length": 2}, "max_length is 2, which leaves no room"),
        (masked_tokens, {"tokenizer": Masked(), "batch_size": 99}, "1,000 tokens, which do not fill a batch of 99 chunks of 22"),
        (span_corruption, {"tokenizer": Ended(), "max_length": 4000}, r"spans, but there are 100 sentinels; lower TextsOptions"),
        (span_corruption, {"tokenizer": Ended(), "texts": ()}, r"TextsOptions\.texts is not set; add TextsOptions\.texts"),
        (span_corruption, {"tokenizer": ""}, r"TextsOptions\.tokenizer is not set"),
        (span_corruption, {"tokenizer": Ended(), "texts": ("absent.jsonl",)}, "absent.jsonl does not exist"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(options, source, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        source(options=options(**changes))


def test_a_trained_wordpiece_vocabulary_is_berts_kind(tmp_path):
    words = ("retrieval", "retrieving", "dense", "denser", "vectors")
    train_wordpiece((f"{a} {b}" for a in words for b in words), tmp_path / "tokenizer.json", vocab_size=60)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.pad_id, tokenizer.mask_id) == ((2,), (3,), 0, 4)
    (ids,) = tokenizer.encode(["Dense retrieval, unheard"])
    assert tokenizer.decode([ids]) == ["dense retrieval"] or 1 in ids
    assert tokenizer.vocab_size <= 60
    with pytest.raises(InputError, match="is too small for these texts; the least is"):
        train_wordpiece(["abcdefghij"], tmp_path / "other.json", vocab_size=8)
    with pytest.raises(InputError, match="no text to train a vocabulary on"):
        train_wordpiece([], tmp_path / "none.json", vocab_size=50)


def test_a_vocabulary_without_a_mask_has_none(tmp_path):
    write_tokenizer(tmp_path, "bert")
    assert load_tokenizer(tmp_path).mask_id is None
