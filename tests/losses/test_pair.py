"""PAIR's three forms: their constants, their bounds and their differences."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from de_jax.losses import in_batch
from de_jax.losses import pair_loss as pair_
from de_jax.types import Embeddings

pair, in_batch_softmax = compiled(pair_.pair), compiled(in_batch.in_batch_softmax)


def orthogonal(num_rows: int) -> Embeddings:
    vectors = jnp.eye(num_rows, dtype=jnp.float32)
    ids = jnp.arange(num_rows, dtype=jnp.int32)
    return Embeddings(vectors, vectors, ids, ids)


def test_eq3_falls_to_minus_93_8_where_the_other_forms_stay_above_0():
    e = orthogonal(512)
    loss, metrics = pair(e, form="samtone_eq3", alpha=1.0)
    np.testing.assert_allclose(loss, math.log(511) - 100, rtol=1e-5)  # -93.8
    np.testing.assert_allclose(metrics["loss_doc_centric"], -93.8, rtol=1e-3)
    for form in ("pair_paper", "pair_code"):
        assert 0 <= pair(e, form=form, alpha=1.0)[0] < 1e-6


def test_collapsed_documents_cost_log_of_their_number():
    e = orthogonal(64)
    same = jnp.zeros((64, 64), jnp.float32).at[:, 0].set(1.0)
    e = e._replace(query=same, doc=same)
    np.testing.assert_allclose(pair(e, form="samtone_eq3", alpha=1.0)[0], math.log(63), rtol=1e-5)
    np.testing.assert_allclose(pair(e, form="pair_paper", alpha=1.0)[0], math.log(64), rtol=1e-5)
    np.testing.assert_allclose(pair(e, form="pair_code", alpha=1.0)[0], math.log(64), rtol=1e-5)


@pytest.mark.parametrize("form", ["samtone_eq3", "pair_paper", "pair_code"])
def test_alpha_0_is_the_query_centric_loss(form, make_embeddings):
    e = make_embeddings(0)
    directions = "both" if form == "samtone_eq3" else "query_to_doc"
    np.testing.assert_allclose(pair(e, form=form, alpha=0.0)[0], in_batch_softmax(e, directions=directions)[0], rtol=1e-6)


def test_without_mined_documents_the_code_is_the_plain_softmax_mixed(make_embeddings):
    """The public code's document-centric term holds no other document then, so it only weighs the two directions."""
    e = make_embeddings(0, num_neg_docs=0)
    query_to_doc, _ = in_batch_softmax(e, directions="query_to_doc")
    doc_to_query, _ = in_batch_softmax(e._replace(neg_queries=None), directions="doc_to_query")
    np.testing.assert_allclose(pair(e, form="pair_code", alpha=0.1)[0], 0.9 * query_to_doc + 0.1 * doc_to_query, rtol=1e-6)


def test_mined_documents_stay_out_of_eq3s_document_term(make_embeddings):
    e = make_embeddings(0)
    without = e._replace(neg_docs=None, neg_doc_ids=None)
    terms = [
        [pair(batch, form=form)[1]["loss_doc_centric"] for batch in (e, without)]
        for form in ("samtone_eq3", "pair_paper", "pair_code")
    ]
    np.testing.assert_array_equal(terms[0][0], terms[0][1])
    assert terms[1][0] > terms[1][1]
    assert terms[2][0] > terms[2][1]


@pytest.mark.parametrize("form", ["samtone_eq3", "pair_paper"])
def test_duplicate_documents_are_left_out_of_the_document_term(form):
    e = orthogonal(8)
    doc = e.doc.at[1].set(e.doc[0])
    e = e._replace(doc=doc, query=doc, doc_id=e.doc_id.at[1].set(0))
    masked = pair(e, form=form, alpha=1.0)[0]
    unmasked = pair(e, form=form, alpha=1.0, mask_duplicates=False)[0]
    # Two rows of eight gain a competitor as good as the positive: from nothing to log 2, or from log 6 - 100 to 0.
    expected = 2 / 8 * (math.log(2) if form == "pair_paper" else 100 - math.log(6))
    np.testing.assert_allclose(unmasked - masked, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("hyper_parameters", "sentence"),
    [
        ({"form": "eq3"}, "form is 'eq3'; it must be 'samtone_eq3', 'pair_paper' or 'pair_code'"),
        ({"alpha": 1.5}, "alpha is 1.5; it must be at most 1"),
        ({"alpha": -0.1}, "alpha is -0.1; it must be at least 0"),
        ({"reduce_directions": "max"}, "reduce_directions is 'max'"),
    ],
)
def test_wrong_hyper_parameters_are_named(hyper_parameters, sentence):
    with pytest.raises(ValueError, match=sentence):
        pair(orthogonal(2), **hyper_parameters)
