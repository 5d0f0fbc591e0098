"""Gradient x input against a linear tower, whose shares are known, and against finite differences."""

import jax
import numpy as np
import pytest
from random_params import random_params

from de_jax.evaluation.saliency import token_saliency
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig

TOKENS = np.array([[5, 3, 9, 2, 7], [4, 4, 0, 0, 0]], np.int32)


def model_and_params(encoder, **tower):
    tower = TowerConfig(encoder, projection_dim=4, **tower)
    model = DualEncoder(tower, tower, shared=())
    return model, random_params(model.init)


def test_the_saliency_of_a_linear_tower_is_the_norm_of_its_terms():
    encoder = BertConfig(
        vocab_size=11, model_dim=6, num_layers=0, num_heads=1, mlp_dim=6, max_positions=8, dropout_rate=0.0, dtype="float32"
    )
    model, params = model_and_params(encoder, normalize=False)
    others = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    scores, saliency = token_saliency(model, params, "doc", TOKENS, others)
    embedded = np.asarray(model.token_embeddings("doc", params, TOKENS), np.float64)
    expected, expected_scores = np.zeros(TOKENS.shape), np.zeros(2)
    for row, tokens in enumerate(TOKENS):
        length = np.count_nonzero(tokens)
        for place in range(length):
            terms = embedded[row, place] * (params["doc"]["projection"]["kernel"] @ others[row]) / length
            expected_scores[row] += terms.sum()  # the score is the sum of these products
            expected[row, place] = np.sqrt(np.sum(terms**2))
    np.testing.assert_allclose(saliency, expected, atol=1e-5)
    np.testing.assert_allclose(scores, expected_scores, atol=1e-5)


@pytest.mark.soak
def test_the_saliency_is_the_norm_of_the_slopes_of_the_score_as_vectors_grow():
    encoder = T5Config(
        vocab_size=11, model_dim=4, num_layers=1, num_heads=1, head_dim=4, mlp_dim=8, dropout_rate=0.0, dtype="float32"
    )
    model, params = model_and_params(encoder)
    others = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
    scores, saliency = token_saliency(model, params, "query", TOKENS, others)
    elements = np.array([(row, place, e) for row, place in np.argwhere(TOKENS) for e in range(4)])
    weights = {2: -1 / 12, 1: 8 / 12, -1: -8 / 12, -2: 1 / 12}  # the five-point rule
    size = 2**-6
    rows, places, dims = np.repeat(elements, len(weights), axis=0).T
    factors = np.ones((len(rows), TOKENS.shape[1], 4), np.float32)
    factors[np.arange(len(rows)), places, dims] += size * np.tile(list(weights), len(elements))

    @jax.jit
    def encoded(params):
        grown = model.token_embeddings("query", params, TOKENS)[rows] * factors
        return model.encode_query(params, TOKENS), model.encode_embedded("query", params, grown, TOKENS[rows])

    unchanged, grown = (np.asarray(found, np.float64) for found in encoded(params))
    np.testing.assert_allclose(scores, np.sum(unchanged * others, axis=1), atol=1e-5)
    terms = np.sum(grown * others[rows], axis=1) * np.tile(list(weights.values()), len(elements)) / size
    slopes = np.zeros((*TOKENS.shape, 4))
    slopes[tuple(elements.T)] = terms.reshape(len(elements), len(weights)).sum(axis=1)
    np.testing.assert_allclose(saliency, np.linalg.norm(slopes, axis=-1), atol=1e-4)
    assert slopes.max() > 0.05
