"""A light query tower for an index that stays as it is."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import de_jax
from de_jax import losses
from de_jax.data.text import beir
from de_jax.evaluation import latency
from de_jax.losses.combination import fields_read
from de_jax.losses.distillation import softmax_over_guide
from de_jax.types import Embeddings, Guide, InputError
from tests import tiny_run
from tests.test_fine_tune import FAST, PAIRS

SIZES = {name: value for name, value in FAST.items() if name != "max_doc_length"} | {"dev_fraction": 0.3}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    fresh = tiny_run.write_run(folder, steps=(1,), num_layers=2)
    return de_jax.fine_tune(fresh, PAIRS, run_dir=folder / "tuned", max_doc_length=24, **SIZES)


def test_documents_keep_their_bits_and_queries_find_them_again(start, tmp_path):
    light = de_jax.lighten(start, PAIRS, run_dir=tmp_path / "light", layers=1, **SIZES)
    texts = [doc for _, doc in PAIRS] + [" ".join(doc for _, doc in PAIRS[:3])]  # the last one is cut as by the model
    assert np.array_equal(light.model.encode_document(texts), start.encode_document(texts))
    assert light.model.run.model.query.encoder.num_layers == 1
    quality, milliseconds = light.report["quality"], light.report["milliseconds"]
    assert quality["before"] == pytest.approx(start.scores["after"], abs=0.05)  # which leaves near-duplicates out
    assert quality["after"] > 0.5 * quality["before"]
    assert milliseconds.keys() == {"whole", "light"}
    assert "documents keep their embeddings" in light.sentence
    kept = json.loads((tmp_path / "light/light.json").read_text())
    assert kept == {"sentence": light.sentence, **light.report}
    assert light.model.scores["after"] == quality["after"]


def test_a_step_takes_the_documents_embeddings_from_the_index():
    ids, (query, doc) = jnp.arange(8), jax.random.normal(jax.random.key(0), (2, 8, 4))
    negatives = {"neg_docs": doc[::-1, None], "neg_doc_ids": ids[:, None] + 8}
    whole = Embeddings(query, doc, ids, ids, **negatives, guide=Guide(query=query, doc=doc, neg_docs=negatives["neg_docs"]))
    loss, _ = losses.in_batch_softmax(whole, temperature=0.05, directions="query_to_doc")
    assert softmax_over_guide(whole._replace(doc=query, neg_docs=whole.neg_docs + 1))[0] == loss
    assert fields_read(softmax_over_guide, whole) == {"query", "query_id", "doc_id", "neg_doc_ids", "guide"}


@pytest.mark.soak
def test_documents_of_any_length_are_encoded_with_each_batch(tmp_path):
    whole = de_jax.load(tiny_run.write_run(tmp_path, steps=(1,), num_layers=2, normalize=False))
    light = de_jax.lighten(whole, PAIRS, run_dir=tmp_path / "light", layers=1, **SIZES | {"num_steps": 4})
    texts = [doc for _, doc in PAIRS[:9]]
    assert np.array_equal(light.model.encode_document(texts), whole.encode_document(texts))
    assert light.report["quality"]["num_queries"] > 10
    assert not (tmp_path / "light/teacher").exists()


def test_a_corpus_that_training_hardly_reads_is_not_encoded(start, tmp_path):
    docs = [*(doc for _, doc in PAIRS), *(f"{doc} and {number}" for number in range(3) for _, doc in PAIRS)]
    splits = {
        name: {f"q{row}": {str(row): 1} for row in rows} for name, rows in (("train", range(0, 60, 2)), ("dev", range(60, 90, 2)))
    }
    beir.write(tmp_path / "data", [(str(row), "", doc) for row, doc in enumerate(docs)],
               [(f"q{row}", PAIRS[row][0]) for row in range(0, 90, 2)], splits)  # fmt: skip
    sizes = {name: value for name, value in SIZES.items() if name != "dev_fraction"}
    light = de_jax.lighten(start, tmp_path / "data", run_dir=tmp_path / "light", layers=1, **sizes | {"num_steps": 2})
    assert light.report["quality"]["num_queries"] <= 15
    assert not (tmp_path / "light/teacher").exists()


@pytest.mark.soak
def test_few_questions_are_said_to_tell_nothing(start, tmp_path):
    light = de_jax.lighten(start, PAIRS, run_dir=tmp_path / "light", layers=1, **SIZES | {"num_steps": 1, "dev_fraction": 0.02})
    assert light.report["quality"]["result"] == "not judged"
    assert "held-out questions, too few to tell a difference from chance; documents keep their embeddings" in light.sentence


def test_timing_says_nothing_of_queries_that_are_cut(start):
    queries = [" ".join(["red fox den"] * number) for number in (5, 6, 7)]
    with warnings.catch_warnings(action="error"):
        (found,) = latency.measure({"whole": start.encoding}, queries, batch_sizes=(1,), num_calls=3)
    assert found.p50 > 0


def test_a_query_may_be_the_average_of_its_tokens(start, tmp_path):
    light = de_jax.lighten(start, PAIRS, run_dir=tmp_path / "light", layers=0, **SIZES | {"learning_rate": None})
    assert light.model.run.model.query.encoder.num_layers == 0
    reordered = light.model.encode_query(["fox red", "red fox"])
    np.testing.assert_allclose(reordered[0], reordered[1], atol=1e-6)
    assert light.report["quality"]["after"] > 0.3 * light.report["quality"]["before"]


def test_a_tower_that_would_not_be_lighter_is_refused(start, tmp_path):
    with pytest.raises(InputError, match=r"layers is 2, but the query tower of .* has 2; a light one has fewer"):
        de_jax.lighten(start, PAIRS, run_dir=tmp_path / "light", layers=2, **SIZES)
    table = tiny_run.write_run(tmp_path, steps=(1,), is_static=True)
    with pytest.raises(InputError, match=r"layers is 0, but the query tower of .* has 0"):
        de_jax.lighten(table, PAIRS, run_dir=tmp_path / "light", layers=0, **SIZES)
    assert not (tmp_path / "light").exists()


def test_a_table_without_held_out_queries_is_refused_before_anything_is_trained(start, tmp_path):
    with pytest.raises(InputError, match="no query is held out"):
        de_jax.lighten(start, PAIRS, run_dir=tmp_path / "light", layers=1, **{**SIZES, "dev_fraction": 0.0})
    assert not (tmp_path / "light").exists()
