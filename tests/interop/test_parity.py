"""Training beside sentence-transformers: the same weights, batches, loss and optimizer end in the same model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from pretrained_folders import WORDS, write_sentence_transformer, write_tokenizer

from de_jax.interop import sentence_transformers
from de_jax.losses.in_batch import in_batch_softmax
from de_jax.models.dual_encoder import DualEncoder
from de_jax.training.optim.optimizer import adamw
from de_jax.training.step.train_step import make_train_step
from de_jax.types import Batch, TrainState

RATE, SCALE, LENGTH = 1e-3, 20.0, 16
NUM_BATCHES, BATCH_SIZE, NUM_DRAWS = 4, 8, 48
# Where a gradient is 0 but for rounding (a key's bias), a smaller one would make the rounding an update.
ADAMW = {"eps": 1e-6, "weight_decay": 0.01}


def sentences(rng):
    return [" ".join(rng.choice(WORDS, rng.integers(2, 12))) for _ in range(BATCH_SIZE)]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Our model and parameters, theirs, and batches of token ids as they tokenize them."""
    torch.set_num_threads(1)  # threads that wait for each other cost more than such a model
    folder = tmp_path_factory.mktemp("parity") / "model"
    write_sentence_transformer(folder, "bert")
    ours = sentence_transformers.read(folder)
    write_tokenizer(folder, "bert").save_pretrained(folder)
    library = pytest.importorskip("sentence_transformers", minversion="6")
    theirs = library.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    rng = np.random.default_rng(0)
    batches = [[theirs.preprocess(sentences(rng)) for _ in ("query", "doc")] for _ in range(NUM_BATCHES)]
    return ours, theirs, batches


def train_theirs(model, batches, *, dropout=False, num_runs=1):
    """The losses and gradient norms of the updates, by run; all begin alike."""
    model.train(dropout)
    torch.manual_seed(0)
    loss_of = pytest.importorskip("sentence_transformers.losses").MultipleNegativesRankingLoss(model, scale=SCALE)
    before, found = {name: value.clone() for name, value in model.state_dict().items()}, []
    for _ in range(num_runs):
        model.load_state_dict(before)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, **ADAMW)
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of([dict(texts) for texts in batch], None)
            loss.backward()
            gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
            found.append((loss.item(), torch.linalg.vector_norm(torch.cat(gradients)).item()))
            optimizer.step()
    return np.array(found).reshape(num_runs, -1)


def our_batch(batch):
    tokens = [np.pad(texts["input_ids"].numpy(), [(0, 0), (0, LENGTH - texts["input_ids"].shape[1])]) for texts in batch]
    ids = np.arange(BATCH_SIZE, dtype=np.int32)
    return Batch(*(one.astype(np.int32) for one in tokens), ids, ids)


def model_and_loss(pretrained, *, dropout_rate):
    tower = pretrained.model.query
    tower = dataclasses.replace(tower, encoder=dataclasses.replace(tower.encoder, dropout_rate=dropout_rate, scan_layers=True))
    loss = functools.partial(in_batch_softmax, temperature=1 / SCALE, directions="query_to_doc")
    return DualEncoder(tower, tower), loss


def train_ours(pretrained, batches, *, dropout_rate=0.0, num_runs=1):
    """The losses and gradient norms of the updates, by run, and the parameters after the last."""
    params = jax.tree.map(jnp.asarray, pretrained.params)
    tx = adamw(lambda step: RATE, params, decayed=(".*",), **ADAMW)
    step = jax.jit(make_train_step(*model_and_loss(pretrained, dropout_rate=dropout_rate), tx))
    first, found = TrainState(np.int32(0), params, jax.jit(tx.init)(params), None), []
    for key in jax.random.key_data(jax.random.split(jax.random.key(0), num_runs)):
        state = first._replace(rng=key)
        for batch in batches:
            state, metrics = step(state, batch)
            found.append((metrics["loss"], metrics["grad_norm"]))
    return np.array(found).reshape(num_runs, -1), state.params


def test_updates_without_dropout_end_in_the_model_of_sentence_transformers(both, tmp_path):
    ours, theirs, batches = both
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    expected = train_theirs(theirs, batches)
    theirs.save(str(tmp_path / "trained"), create_model_card=False)
    theirs.load_state_dict(before)
    found, params = train_ours(ours, [our_batch(batch) for batch in batches])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    trained = sentence_transformers.read(tmp_path / "trained").params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, trained)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ours.params, trained)
    assert np.median(jax.tree.leaves(moved)) > NUM_BATCHES * RATE / 2


@pytest.mark.soak
def test_updates_with_dropout_have_the_distribution_of_those_of_sentence_transformers(both):
    ours, theirs, (*batches, _, _) = both
    assert len(batches) == 2
    ours, _ = train_ours(ours, [our_batch(batch) for batch in batches], dropout_rate=0.1, num_runs=NUM_DRAWS)
    theirs = train_theirs(theirs, batches, dropout=True, num_runs=NUM_DRAWS)
    error = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / NUM_DRAWS)
    assert (abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 4 * error).all()
    # The logarithm of each deviation has an error of 1 / sqrt(2 NUM_DRAWS).
    assert (abs(np.log(ours.std(axis=0) / theirs.std(axis=0))) < 4 / np.sqrt(NUM_DRAWS)).all()
