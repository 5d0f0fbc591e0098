"""The updates of SamToNe's recipe are those of a trajectory in numpy: derivatives by hand, Adafactor as it was published."""

import jax
import jax.numpy as jnp
import numpy as np

from de_jax.configurables import read_recipe
from de_jax.types import Batch

# A tower of no layers: vectors of tokens, a norm, the mean, a projection, length 1.
SIZES = ("vocab_size=130", "model_dim=128", "num_layers=0", "dtype=float32", "dropout_rate=0.0")
EMBEDDING, SCALE, KERNEL = "embedder/embedding", "encoder/encoder_norm/scale", "projection/kernel"
TAU, RATE, NUM_STEPS = 0.01, 1e-3, 5


def encode(params, tokens):
    """Embeddings, and a function from their derivatives to those of the parameters."""
    mask = (tokens != 0)[..., None] / (tokens != 0).sum(1)[:, None, None]
    vectors = params[EMBEDDING][tokens]
    inverse = 1.0 / np.sqrt(np.mean(np.square(vectors), -1, keepdims=True) + 1e-6)
    pooled = np.sum(mask * vectors * inverse * params[SCALE], 1)
    projected = pooled @ params[KERNEL]
    length = np.linalg.norm(projected, axis=-1, keepdims=True)
    units = projected / length

    def backward(d_units):
        d_projected = (d_units - units * np.sum(units * d_units, -1, keepdims=True)) / length
        d_normed = mask * (d_projected @ params[KERNEL].T)[:, None]
        d_scaled = d_normed * params[SCALE]
        d_vectors = inverse * d_scaled - vectors * inverse**3 * np.mean(d_scaled * vectors, -1, keepdims=True)
        d_embedding = np.zeros_like(params[EMBEDDING])
        np.add.at(d_embedding, tokens, d_vectors)
        d_scale = np.sum(d_normed * vectors * inverse, (0, 1))
        return {EMBEDDING: d_embedding, SCALE: d_scale, KERNEL: pooled.T @ d_projected}

    return units, backward


def softmax_loss(scores):
    """The mean of -log of the diagonal's shares, and its derivative by the scores."""
    number = len(scores)
    shares = np.exp((scores - scores.max(1, keepdims=True)) / TAU)
    shares /= shares.sum(1, keepdims=True)
    return -np.mean(np.log(np.diagonal(shares))), (shares - np.eye(*scores.shape)) / TAU / number


def samtone(queries, docs):
    """Eq. 2 plus the softmax of documents, and derivatives; repeated texts are negatives like any other."""
    number = len(queries)
    among_queries = np.where(np.eye(number, dtype=bool), -1e9, queries @ queries.T)
    by_query, d_by_query = softmax_loss(np.concatenate([queries @ docs.T, among_queries], 1))
    by_doc, d_by_doc = softmax_loss(docs @ queries.T)
    across, within = d_by_query[:, :number], d_by_query[:, number:]
    d_queries = across @ docs + (within + within.T) @ queries + d_by_doc.T @ docs
    return by_query + by_doc, d_queries, across.T @ queries + d_by_doc @ queries


def adafactor(value, gradient, memory, step, rate):
    """Shazeer and Stern (2018), algorithms 4 and 5 with the settings of section 8: the new value; `step` counts from 1.

    The memory counts the steps of T5's pretraining too, as in T5X Retrieval's public code.
    """
    decay, squares = 1.0 - (step + 1_000_000) ** -0.8, np.square(gradient) + 1e-30
    means = (squares.mean(1), squares.mean(0)) if squares.ndim == 2 and min(squares.shape) >= 128 else (squares,)
    memory[:] = [decay * old + (1.0 - decay) * new for old, new in zip(memory or [0.0] * len(means), means, strict=True)]
    moment = np.outer(*memory) / memory[0].mean() if len(memory) == 2 else memory[0]
    update = gradient / np.sqrt(moment)
    update /= max(1.0, np.sqrt(np.mean(np.square(update))))
    return value - rate * max(1e-3, np.sqrt(np.mean(np.square(value)))) * update


def batch_of(seed):
    rng = np.random.default_rng(seed)
    queries, docs = rng.integers(3, 130, (4, 5), np.int32), rng.integers(3, 130, (4, 8), np.int32)
    queries[1, 3:], docs[2, 6:] = 0, 0
    docs[3] = docs[0]  # the same document twice
    return Batch(queries, docs, np.arange(4, dtype=np.int32), np.array([0, 1, 2, 0], np.int32))


def by_path(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree["shared"])[0]
    return {"/".join(key.key for key in path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def test_loss_gradient_norm_and_adafactors_updates_follow_the_trajectory():
    settings = [*(f"T5Config.{size}" for size in SIZES), "TowerConfig.projection_dim=128", f"Optimization.num_steps={NUM_STEPS}"]
    recipe = read_recipe(["recipes/paper/samtone/base_sde_query.gin"], settings)
    state = recipe.init()
    step = jax.jit(recipe.train_step(state.params))
    expected, memories = by_path(state.params), {}
    for number in range(3):
        batch, before = batch_of(number), {path: expected[path] for path in (EMBEDDING, SCALE, KERNEL)}
        (queries, from_queries), (docs, from_docs) = encode(before, batch.query), encode(before, batch.doc)
        loss, d_queries, d_docs = samtone(queries, docs)
        of_queries, of_docs = from_queries(d_queries), from_docs(d_docs)
        gradients = {path: of_queries[path] + of_docs[path] for path in before}
        norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients.values()))
        assert norm > 1.0  # clipping at 1 would show in what Adafactor remembers
        rate = RATE * (1 - number / (NUM_STEPS - 1))
        for path, value in before.items():
            expected[path] = adafactor(value, gradients[path], memories.setdefault(path, []), number + 1, rate)
        state, metrics = step(state, jax.tree.map(jnp.asarray, batch))
        np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=1e-5)
        np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-4)
        after = by_path(state.params)
        for path, value in before.items():
            update = expected[path] - value
            np.testing.assert_allclose(after[path] - value, update, atol=1e-4 * np.abs(update).max() + 1e-7, err_msg=path)
