"""What every loss test shares: strict dtypes, and random batches with all that can go wrong in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.types import PADDING_ID, Embeddings, Guide


@pytest.fixture(autouse=True)
def strict_dtypes():
    """No silent promotion in a loss: bfloat16 or float64 would slip in unseen."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def make_embeddings():
    """Draws embeddings as JAX arrays: few distinct ids, so duplicates abound; mined negatives with fillers and own positives; a
    teacher's scores, of which a fifth are not there; a guide's vectors, by which half of the candidates are too close.
    """

    def make(
        seed=0, *, num_rows=8, dim=3, num_padding=2, num_ids=5, num_neg_docs=3, num_neg_queries=2, num_positives=0, unique=False
    ) -> Embeddings:
        rng = np.random.default_rng(seed)

        def unit(*shape):
            vectors = rng.normal(size=shape)
            return jnp.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), jnp.float32)

        def ids(*shape):
            return rng.integers(PADDING_ID, num_ids, size=shape).astype(np.int32)

        query_id, doc_id = np.arange(num_rows, dtype=np.int32), np.arange(num_rows, dtype=np.int32)
        if not unique:
            query_id, doc_id = (rng.integers(0, num_ids, size=num_rows).astype(np.int32) for _ in range(2))
        guide = np.random.default_rng((seed, 3)).normal(size=(2 + num_neg_docs + num_neg_queries, num_rows, 4)).astype(np.float32)
        guide /= np.linalg.norm(guide, axis=-1, keepdims=True)
        padding = rng.permutation(num_rows)[:num_padding]
        scores = np.random.default_rng((seed, 1)).normal(scale=2.0, size=(num_rows, 1 + num_neg_docs)).astype(np.float32)
        scores[np.random.default_rng((seed, 2)).random(scores.shape) < 0.2] = np.nan
        query_id[padding] = doc_id[padding] = PADDING_ID
        return Embeddings(
            query=unit(num_rows, dim),
            doc=unit(num_rows, dim),
            query_id=jnp.asarray(query_id),
            doc_id=jnp.asarray(doc_id),
            neg_docs=unit(num_rows, num_neg_docs, dim) if num_neg_docs else None,
            neg_doc_ids=jnp.asarray(ids(num_rows, num_neg_docs)) if num_neg_docs else None,
            neg_queries=unit(num_rows, num_neg_queries, dim) if num_neg_queries else None,
            neg_query_ids=jnp.asarray(ids(num_rows, num_neg_queries)) if num_neg_queries else None,
            positive_ids=jnp.asarray(ids(num_rows, num_positives)) if num_positives else None,
            scores=jnp.asarray(scores),
            guide=Guide(
                *map(jnp.asarray, guide[:2]),
                neg_docs=jnp.asarray(guide[2 : 2 + num_neg_docs].swapaxes(0, 1)),
                neg_queries=jnp.asarray(guide[2 + num_neg_docs :].swapaxes(0, 1)),
            ),
        )

    return make
