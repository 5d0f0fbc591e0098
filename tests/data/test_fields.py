"""Documents of several fields: their tokens are those of transformers' pairs, and a run keeps how it reads them."""

import json
import pickle

import numpy as np
import pytest
import tiny_run
import tokenizers
from flat_settings import flat
from pretrained_folders import write_tokenizer

import de_jax
from de_jax import cli
from de_jax.data.sources.training_set import beir_pairs
from de_jax.data.stores.corpus import cached_token_store, tokenized
from de_jax.data.text import tokenizing
from de_jax.data.text.tokenizing import JsonTokenizer, document, field_of, load_tokenizer, with_prompt
from de_jax.training.run.run_folder import describe_run, load_run
from de_jax.types import InputError

TITLE, TEXT, URL = "dense retrieval", "a query of texts and a passage", "hello world"


@pytest.fixture(params=["bert", "roberta", "t5"])
def known(request, tmp_path):
    """A tokenizer of ours, and transformers' of the same file, whose pairs are `[CLS] A [SEP] B [SEP]`."""
    theirs = write_tokenizer(tmp_path, request.param)
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    backend, (start, end) = theirs.backend_tokenizer, (tokenizer.prefix_ids, tokenizer.suffix_ids)
    first, last = (backend.id_to_token(int(tokenizer.by_padding(np.array(ids))[0])) if ids else "" for ids in (start, end))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        f"{first} $A {last}".strip(),
        f"{first} $A {last} $B {last}".strip(),
        [(piece, backend.token_to_id(piece)) for piece in (first, last) if piece],
    )
    return tokenizer, theirs


def test_fields_are_encoded_as_pairs_are_in_transformers(known):
    ours, theirs = known
    separated = with_prompt(ours, None, ("title", "text"))
    store = tokenized([document(TITLE, TEXT, URL), document("", TEXT), TEXT], separated)
    for length in (6, 9, 40):  # cut in the text, as "only_second" does
        expected = theirs(TITLE, TEXT, truncation="only_second", max_length=length)["input_ids"]
        assert ours.by_padding(store.pad(np.array([0]), length, 40))[0, : len(expected)].tolist() == expected
    expected = theirs(TEXT)["input_ids"]
    assert all(ours.by_padding(store.pad(np.array([row]), 40, 40))[0, : len(expected)].tolist() == expected for row in (1, 2))


def test_every_field_follows_the_end_of_a_text(known):
    ours, theirs = known
    all_fields = with_prompt(ours, "query ", ("url", "title", "text"))
    end = ours.by_padding(np.array(ours.suffix_ids)).tolist()
    ids = [theirs(part, add_special_tokens=False)["input_ids"] for part in (f"query {URL}", TITLE, TEXT)]
    one = document(TITLE, TEXT, URL)
    found = all_fields.encode([one])[0]
    assert ours.by_padding(found).tolist() == [*ids[0], *end, *ids[1], *end, *ids[2]]
    spans = tokenizing.spans(all_fields, one)
    shown = [one[begin:last] for begin, last in spans]
    assert len(spans) == len(found)
    assert [word for word in shown if word] == f"{TITLE} {TEXT}".split()
    assert with_prompt(all_fields, "", ()).fingerprint == ours.fingerprint
    prints = {with_prompt(ours, None, fields).fingerprint for fields in ((), ("text",), ("title", "text"), ("text", "title"))}
    assert len(prints) == 4


def test_a_document_is_one_text_to_whoever_asks_for_no_field():
    one = pickle.loads(pickle.dumps(document(f" {TITLE} ", f" {TEXT}", URL)))
    assert one.split() == f"{TITLE} {TEXT}".split()
    assert [field_of(one, name) for name in ("url", "title", "text")] == [URL, TITLE, TEXT]
    assert [field_of(TEXT, name) for name in ("url", "title", "text")] == ["", "", TEXT]
    assert document(" ", "\u200b", URL) == ""


def test_fields_need_a_token_that_separates_them(tmp_path):
    write_tokenizer(tmp_path, "bert")
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**file, "post_processor": None}))
    with pytest.raises(InputError, match="doc_fields are separated by the token that ends a text"):
        with_prompt(load_tokenizer(tmp_path), None, ("title", "text"))


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.tsv"])
def test_stores_of_other_fields_are_other_stores(tmp_path, name):
    write_tokenizer(tmp_path, "bert")
    rows = {"_id": "d", "title": TITLE, "text": TEXT, "metadata": {"url": URL}}
    line = json.dumps(rows) if name.endswith("jsonl") else f"d\t{URL}\t{TITLE}\t{TEXT}"
    (tmp_path / name).write_text(f"{line}\n")
    bare, stores = load_tokenizer(tmp_path), {}
    for fields in (None, ("title", "text"), ("url", "title", "text"), ("text",)):
        tokenizer = with_prompt(bare, None, fields)
        store = cached_token_store(tmp_path / name, tokenizer, tmp_path / "cache")
        stores[store.content_hash] = store.store_dir
        assert np.count_nonzero(store.tokens == bare.suffix_ids[0]) == max(len(fields or ()) - 1, 0)
        tokenizer.save(tmp_path)
        assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
        (tmp_path / tokenizing.PROMPT_FILE).unlink(missing_ok=True)
    assert len(stores) == len(set(stores.values())) == 4
    kept = cached_token_store(tmp_path / name, bare, tmp_path / "cache", kind="queries")
    assert len(kept.tokens) == len(TEXT.split())


def test_a_run_keeps_its_fields_for_search_and_scores_and_goes_on_with_no_others(tmp_path, capsys):
    data, run_dir = tiny_run.write_dataset(tmp_path / "data"), tmp_path / "with_fields"
    bare = tiny_run.write_run(tmp_path, steps=(3,))
    cli.call("import model", [f"--from={bare}", "--doc_fields", "title", "text", f"--run_dir={run_dir}"])
    run = load_run(run_dir)
    assert (run.doc.fields, run.query.fields) == (("title", "text"), ())
    described = {"model": run.model, "query": run.query, "doc": run.doc}
    describe_run(run_dir, **described)
    with pytest.raises(InputError, match="was begun with tokenizers/doc"):
        describe_run(run_dir, **described | {"doc": run.doc.with_prompt(None, ("text",))})
    options = {"dataset_dir": str(data), "cache_dir": str(tmp_path / "cache"), "batch_size": 1, "tokenizer": run.query.tokenizer}
    trained = flat(beir_pairs)(**options, doc_fields=("title", "text"))
    assert trained.doc.tokenizer.fingerprint == run.doc.tokenizer.fingerprint

    capsys.readouterr()
    cli.call("evaluate beir", [f"--run_dir={run_dir}", f"--dataset_dir={data}", "--no_bm25"])
    assert json.loads(capsys.readouterr().out)["settings"]["doc_fields"] == ["title", "text"]
    model, joined = de_jax.load(run_dir), de_jax.load(run_dir, doc_fields=())
    _, title, text = tiny_run.DOCS[0]
    one = {"title": title, "text": text}
    assert not np.allclose(model.encode_document([one]), joined.encode_document([one]))
    assert np.allclose(joined.encode_document([one]), model.encode_document([f"{title} {text}"]), atol=1e-6)
