"""What is special about losses over a row's own mined negatives."""

import jax.numpy as jnp
import naive
import numpy as np
import pytest

from de_jax.losses.in_batch import in_batch_softmax
from de_jax.losses.mined import ance, dance
from de_jax.types import InputError


def test_a_row_does_not_meet_the_negatives_of_another(make_embeddings):
    e = make_embeddings(0, unique=True, num_padding=0)._replace(neg_doc_ids=None)
    alone = [ance(type(e)(*(None if field is None else field[row : row + 1] for field in e)))[0] for row in range(8)]
    np.testing.assert_allclose(ance(e)[0], np.mean(alone), rtol=1e-6)


def test_ance_with_one_negative_is_the_logistic_loss_of_the_score_difference(make_embeddings):
    e = make_embeddings(1, unique=True, num_padding=0, num_neg_docs=1)._replace(neg_doc_ids=None)
    difference = jnp.einsum("BD,BD->B", e.query, e.neg_docs[:, 0] - e.doc)
    np.testing.assert_allclose(ance(e)[0], np.mean(np.log1p(np.exp(difference))), rtol=1e-5)


def test_a_batch_of_one_row_with_in_batch_documents_is_the_plain_softmax(make_embeddings):
    e = make_embeddings(2, num_padding=7)
    expected, _ = in_batch_softmax(e, temperature=0.1, directions="query_to_doc")
    np.testing.assert_allclose(ance(e, temperature=0.1, in_batch=True)[0], expected, rtol=1e-5)


def test_dance_without_its_dual_task_is_ance(make_embeddings):
    e = make_embeddings(3)
    np.testing.assert_allclose(dance(e, dual_weight=0.0)[0], ance(e, temperature=0.01)[0], rtol=1e-6)


@pytest.mark.parametrize("mask_duplicates", [True, False])
def test_rows_whose_negatives_are_all_fillers_cost_nothing(mask_duplicates, make_embeddings):
    e = make_embeddings(4)
    e = e._replace(neg_doc_ids=jnp.full_like(e.neg_doc_ids, -1), neg_query_ids=jnp.full_like(e.neg_query_ids, -1))
    value, metrics = dance(e, mask_duplicates=mask_duplicates)
    np.testing.assert_allclose(value, 0.0, atol=1e-7)
    assert all(np.isfinite(metric) for metric in metrics.values())
    assert naive.dance(e, mask_duplicates=mask_duplicates) == 0


def test_missing_negatives_and_bad_weights_are_refused(make_embeddings):
    e = make_embeddings(5)
    with pytest.raises(InputError, match="batches come without neg_docs; name a folder of negatives"):
        ance(e._replace(neg_docs=None, neg_doc_ids=None))
    with pytest.raises(InputError, match="batches come without neg_queries"):
        dance(e._replace(neg_queries=None, neg_query_ids=None))
    with pytest.raises(InputError, match=r"dual_weight=-1\.0 must be at least 0"):
        dance(e, dual_weight=-1.0)
