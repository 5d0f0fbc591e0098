"""Empty texts are left out everywhere alike and counted, whatever reads them."""

import gzip
import json

import numpy as np
import pytest
from flat_settings import flat

from de_jax.data.sources.training_set import beir_pairs, dev_set, open_stores, qrel_pairs
from de_jax.data.stores import corpus
from de_jax.data.text import beir, input_policy
from de_jax.doc2query.generator_run import doc_query_pairs
from de_jax.types import InputError
from experiments.group_relevance import ranked_pairs

WORDS = ("fox", "dog", "wizards", "boxed", "lazy", "quick")
DOCS = [(f"d{i}", "", "" if i in (2, 7) else f"the {WORDS[i % 6]} jumps over {WORDS[i * 5 % 6]}") for i in range(10)]
QUERIES = [(f"q{i}", " " if i == 3 else f"{WORDS[i % 6]} {i}") for i in range(8)]
QRELS = {
    "train": {f"q{i}": {f"d{i}": 1, f"d{i + 1}": 1} for i in range(8)},
    "dev": {"q0": {"d0": 1, "d2": 1}, "q3": {"d1": 1}, "q5": {"d7": 1}},
}
TRAINED = [(f"q{i}", f"d{j}") for i in range(8) for j in (i, i + 1) if i != 3 and j not in (2, 7)]


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beir") / "holes"
    beir.write(folder, DOCS, QUERIES, QRELS)
    return folder


@pytest.fixture
def stores(dataset_dir, tokenizer, tmp_path):
    return open_stores(dataset_dir, tokenizer, tokenizer, tmp_path / "cache", skip_empty=True)


def ids_of(pairs, stores):
    return [(stores[0].ids[query], stores[1].ids[doc]) for query, doc in pairs.tolist()]


def test_stores_leave_empty_texts_out_and_say_which(dataset_dir, tokenizer, tmp_path):
    with pytest.warns(UserWarning, match="empty texts left out") as said:
        queries, docs = open_stores(dataset_dir, tokenizer, tokenizer, tmp_path, skip_empty=True)
    sentences = [str(one.message) for one in said]
    assert sentences == [
        f"{dataset_dir}/queries.jsonl: empty texts left out: 1 (q3).",
        f"{dataset_dir}/corpus.jsonl.gz: empty texts left out: 2 (d2, d7).",
    ]
    assert (queries.num_texts, docs.num_texts) == (7, 8)
    with pytest.warns(UserWarning, match=r"empty texts left out: 2 \(d2, d7\)"):  # opened, not built
        open_stores(dataset_dir, tokenizer, tokenizer, tmp_path, skip_empty=True)


def test_pairs_of_empty_texts_are_left_out_and_counted_but_unknown_ones_refused(stores):
    with pytest.warns(UserWarning, match="relevant pairs left out, .*: 6"):
        pairs = qrel_pairs(QRELS["train"], *stores)
    assert ids_of(pairs, stores) == TRAINED
    with pytest.raises(InputError, match=r"document ids of the qrels that are not in .*: 1 \(d99\)"):
        qrel_pairs({"q0": {"d0": 1, "d99": 1}}, *stores)


@pytest.mark.filterwarnings("ignore")
def test_a_dev_set_counts_an_empty_query_as_not_found(stores):
    dev = dev_set(QRELS["dev"], *stores, 10, 100)
    assert {stores[0].ids[row] for row in dev.query_rows.tolist()} == {"q0", "q5"}
    assert dev.qrels == QRELS["dev"]
    with pytest.raises(InputError, match="judged 1 or more, so there is nothing to score on the dev split"):
        dev_set({"q0": {"d0": 0}}, *stores, 10, 100)


@pytest.mark.filterwarnings("ignore")
def test_generated_queries_are_ranked_for_the_pairs_that_are_trained_on(dataset_dir, stores, tmp_path):
    lines = [json.dumps({"_id": doc_id, "queries": [f"{doc_id} a", "quick fox"]}) for doc_id, _, text in DOCS if text]
    (tmp_path / "expansion.jsonl").write_text("\n".join(lines))
    ranked = ranked_pairs(dataset_dir, "train", tmp_path / "expansion.jsonl", skip_empty=True)
    assert len(ranked.offsets) - 1 == len(TRAINED)
    assert np.all(np.diff(ranked.offsets) == 2)


@pytest.mark.filterwarnings("ignore")
def test_trainers_read_a_folder_with_empty_texts_when_asked(dataset_dir, tokenizer, tmp_path):
    sizes = {"max_query_length": 8, "max_doc_length": 16, "cache_dir": str(tmp_path)}
    options = {"dataset_dir": str(dataset_dir), "tokenizer": tokenizer, "batch_size": 4, "dev_split": "dev", "pack": False, **sizes}
    with pytest.raises(InputError, match=r"the text of q3 is empty; .* set skip_empty\.$"):
        flat(beir_pairs)(**options)
    data = flat(beir_pairs)(**options, skip_empty=True, num_for_both=8)
    assert len(data.texts.pairs) == len(TRAINED)
    assert {data.query_ids[row] for row in data.for_both.rows.tolist()} == {"q0", "q5"}
    assert next(data.batches(0)).query_id.shape == (4,)
    with pytest.raises(InputError, match="set skip_empty"):
        doc_query_pairs([dataset_dir], tokenizer, batch_size=2, **sizes)
    assert doc_query_pairs([dataset_dir], tokenizer, batch_size=2, skip_empty=True, **sizes).texts.pairs.shape == (len(TRAINED), 2)


def test_a_data_set_in_memory_takes_a_judged_query_without_text(dataset_dir):
    with pytest.warns(UserWarning, match="empty texts left out: 1"):
        data = beir.read(dataset_dir, "dev", skip_empty=True)
    assert data.queries.ids == ["q0", "q5"]
    assert data.qrels == QRELS["dev"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([("a", "fox"), ("b", "dog"), ("a", "fox")], "1 duplicate ids; 'a' is the id of texts 1 and 3"),
        ([], "there is no text to tokenize"),
    ],
)
def test_faults_that_a_store_finds_name_the_file(tmp_path, tokenizer, lines, message):
    path = tmp_path / "corpus.tsv"
    path.write_text("".join(f"{text_id}\t{text}\n" for text_id, text in lines))
    with pytest.raises(InputError) as error:
        corpus.cached_token_store(path, tokenizer, tmp_path / "cache", progress=False)
    assert str(error.value).startswith(f"{path}: {message}")


def test_judgements_may_be_compressed(dataset_dir, tmp_path):
    beir.write(tmp_path, DOCS, QUERIES, QRELS)
    plain = tmp_path / "qrels" / "dev.tsv"
    packed = plain.with_name("dev.tsv.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(InputError, match=r"holds both dev\.tsv and dev\.tsv\.gz; remove one"):
        beir.find_qrels(tmp_path, "dev")
    plain.unlink()
    assert beir.dev_split(tmp_path) == "dev"
    (tmp_path / "qrels" / "notes.txt").write_text("")
    assert beir.find_splits(tmp_path) == {"dev": packed, "train": tmp_path / "qrels" / "train.tsv"}
    assert beir.read_qrels(beir.find_qrels(tmp_path, "dev")) == QRELS["dev"]
    with pytest.raises(InputError, match="has no split 'test'; it has dev, train"):
        beir.find_qrels(tmp_path, "test")


def test_only_relevant_judgements_of_identical_ids_are_counted(recwarn):
    input_policy.tell_identical("set", {"a": {"a": 1}, "b": {"b": 0, "c": 1}, "c": {"a": 1}})
    input_policy.tell_identical("set", {"b": {"b": 0}, "c": {"a": 1}})
    (said,) = recwarn
    assert str(said.message).startswith("set: judgements dropped, as the document has the id of its query: 1 (a)")


def test_training_says_which_texts_its_lengths_cut(tmp_path, tokenizer, recwarn):
    docs = [(f"d{i}", "", "words " * (30 if i < 10 else 3)) for i in range(40)]
    beir.write(tmp_path, docs, [(f"q{i}", "words") for i in range(20)], {"train": {f"q{i}": {f"d{i}": 1} for i in range(20)}})

    def told(**changes):
        options = {"tokenizer": tokenizer, "batch_size": 4, "unique_in_batch": False, "cache_dir": str(tmp_path / "cache")}
        flat(beir_pairs)(str(tmp_path), **options, **changes)
        return [str(recwarn.pop().message) for _ in range(len(recwarn))]

    (said,) = told(max_query_length=32, max_doc_length=16)
    cut = f"{tmp_path.name}: 50 % of the documents in training have more than max_doc_length = 16 tokens and are cut at their end; "
    assert said.startswith(f"{cut}99 % have at most ")
    assert told(max_query_length=32, max_doc_length=512) == []
    assert told(max_query_length=32, max_doc_length=16, max_passages=30) == []
