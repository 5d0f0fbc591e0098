"""Training by the best passage of each document: the same as scoring every passage in a loop and taking the highest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from letters import Letters
from toy_batches import pair_batches

from de_jax.data.batches.pair_batches import DocTexts, Negatives
from de_jax.data.stores.corpus import build_token_store
from de_jax.data.text.passages import PassageStore
from de_jax.losses.mined import ance
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import PARTS, TowerConfig
from de_jax.training.mesh import sharding
from de_jax.training.step.as_trained import ChunkedModel
from de_jax.types import PADDING_ID

ENCODER = T5Config(
    vocab_size=29, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32, dtype="float32", dropout_rate=0.0
)
TOWER = TowerConfig(ENCODER, projection_dim=8, normalize=False)
MODEL = DualEncoder(TOWER, TOWER, PARTS)
LENGTH, MOST = 6, 3
ROWS = 8
QUERIES = ["fox", "sea", "den", "red", "owl", "yew", "oak", "elm"]
DOCS = ["abcdefghijklmnopqrst", "xy", "klmnopqr", "q", "zebracrossing", "mnop", "thequickbrownfox", "dog", "catsanddogs", "ox"]
NEGATIVES = np.array([[8, 9], [0, 4], [6, PADDING_ID], [0, 8], [1, 9], [6, 0], [4, 2], [PADDING_ID, PADDING_ID]], np.int32)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return [
        build_token_store([(f"{kind}{i}", text) for i, text in enumerate(texts)], Letters(), folder / kind, progress=False)
        for kind, texts in (("q", QUERIES), ("d", DOCS))
    ]


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(jax.random.key(0))


def batch_of(stores, *, pack, most=MOST, **options):
    pairs = np.stack([np.arange(ROWS)] * 2, axis=1).astype(np.int32)
    passages = PassageStore(stores[1], LENGTH, max_passages=most)
    settings = {"batch_size": ROWS, "max_query_length": 8, "max_doc_length": LENGTH, "pack": pack, "length_multiple": 2}
    negatives = {"neg_docs": Negatives(NEGATIVES, 2)}
    doc_texts = DocTexts(passages, lambda docs, chosen, step: passages.of_docs(docs)) if passages else None
    return next(pair_batches(*stores, pairs, doc_texts=doc_texts, negatives=lambda _: negatives, **settings, **options)(0))


def passages_of(text):
    room = LENGTH - 2
    return [text[start : start + room] for start in range(0, len(text), room)][:MOST]


def loss_by_loops(ids, params):
    """`ance` over every passage's own score, row by row; `ids` are those of a batch."""
    texts = [*QUERIES, *(passage for doc in DOCS for passage in passages_of(doc))]
    tokens = [[28, *(ord(letter) - 95 for letter in text), 1] for text in texts]
    padded = jnp.array([[*row, *[0] * (LENGTH - len(row))] for row in tokens])
    encoded = dict(zip(texts, MODEL.encode_doc(params, padded), strict=True))

    def score(query, doc):
        return functools.reduce(jnp.maximum, [jnp.dot(query, encoded[passage]) for passage in passages_of(DOCS[doc])])

    losses = []
    for query_row, doc_row, negatives in zip(*(rows.tolist() for rows in ids), strict=True):
        query = encoded[QUERIES[query_row]]
        scores = [score(query, doc) for doc in (doc_row, *negatives) if doc != PADDING_ID]
        losses.append(jax.nn.logsumexp(jnp.stack(scores)) - scores[0])
    return sum(losses) / len(losses)


def loss_of(model, params, batch):
    return ance(model.embed(params, batch))[0]


@pytest.mark.soak
def test_the_reference_takes_other_passages_than_the_first(stores, params):
    """A test of the tests: here the best passage is often not the first."""
    batch, first = (batch_of(stores, pack=False, most=most) for most in (MOST, 1))
    assert batch.doc.shape[1:] == (MOST, LENGTH)
    losses = [jax.jit(functools.partial(loss_of, MODEL))(params, rows) for rows in (batch, first)]
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.fixture(scope="module")
def expected(stores, params):
    batch = batch_of(stores, pack=False)
    ids = batch.query_id, batch.doc_id, batch.neg_doc_ids
    return jax.jit(jax.value_and_grad(functools.partial(loss_by_loops, ids)))(params)


@pytest.mark.parametrize(("pack", "num_chunks"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.soak
@pytest.mark.short_soak
def test_a_document_scores_as_its_best_passage_and_no_other_gets_a_gradient(stores, params, expected, pack, num_chunks):
    batch = batch_of(stores, pack=pack, row_multiple=num_chunks)
    model = ChunkedModel(MODEL, num_chunks) if num_chunks > 1 else MODEL
    found = jax.jit(jax.value_and_grad(functools.partial(loss_of, model)))(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


@pytest.mark.soak
def test_eight_devices_give_the_gradient_of_one(stores, params, expected):
    mesh = sharding.make_mesh(8)
    placed = jax.device_put(params, sharding.replicated(mesh)), sharding.place(batch_of(stores, pack=True, row_multiple=8), mesh)
    found = jax.jit(jax.value_and_grad(functools.partial(loss_of, MODEL)))(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
