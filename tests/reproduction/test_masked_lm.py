"""Our masked language model against transformers' BERT with the same random weights."""

import dataclasses

import jax
import jax.flatten_util
import numpy as np
import pretrained_folders
import pytest
import torch
from pretrained_folders import torch_model, write_tokenizer

from de_jax.interop import any_model
from de_jax.models.bert import BertConfig
from reproduction.masked_lm import MaskedLanguageModel, MaskedTexts


def test_the_loss_is_that_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(pretrained_folders.SIZES, "num_hidden_layers", 1)  # which compiles in half the time
    theirs = torch_model("bert", whole=True)
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "bert")
    read = any_model.read(tmp_path)
    model = MaskedLanguageModel(read.model.query.encoder)
    weights = {name: value.detach().numpy() for name, value in theirs.state_dict().items()}
    transform, prefix = "cls.predictions.transform", "cls.predictions"
    head = {
        "dense": {"kernel": weights[f"{transform}.dense.weight"].T, "bias": weights[f"{transform}.dense.bias"]},
        "norm": {"scale": weights[f"{transform}.LayerNorm.weight"], "bias": weights[f"{transform}.LayerNorm.bias"]},
        "bias": weights[f"{prefix}.bias"],
    }
    params = {**read.params["shared"], "head": head}
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 17, (3, 9)).astype(np.int32)
    tokens[1, 6:] = 0
    places = np.array([[1, 4], [0, 3], [2, 8]], np.int32)
    targets = rng.integers(1, 17, (3, 2)).astype(np.int32)
    labels = torch.full((3, 9), -100)
    for row in range(3):
        labels[row, places[row]] = torch.tensor(targets[row]).long()
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens), attention_mask=torch.tensor(tokens != 0)).prediction_logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    batch = MaskedTexts(tokens, places, targets, np.arange(3))
    actual, metrics = jax.jit(model.loss)(params, batch)
    np.testing.assert_allclose(actual, expected.item(), rtol=1e-5)
    right = np.take_along_axis(logits.argmax(-1).numpy(), places, axis=1) == targets
    np.testing.assert_allclose(metrics["token_accuracy"], right.mean(), rtol=1e-6)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.map(np.shape, shapes) == jax.tree.map(np.shape, params)


@pytest.mark.soak
def test_bfloat16_has_gradients_on_a_cpu():
    """XLA turned the words' product round to transpose its gradient, and had no kernel for it."""
    encoder = BertConfig(vocab_size=40, model_dim=8, num_layers=1, num_heads=2, mlp_dim=16, dtype="float32")
    model = MaskedLanguageModel(encoder)
    params = model.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(1, 40, (4, 16)).astype(np.int32)
    batch = MaskedTexts(tokens, tokens[:, :2] % 16, tokens[:, 2:4], np.arange(4))
    in_bfloat16 = MaskedLanguageModel(dataclasses.replace(encoder, dtype="bfloat16"))
    gradients = (jax.jit(jax.grad(lambda p, m=m: m.loss(p, batch)[0]))(params) for m in (model, in_bfloat16))
    expected, actual = (jax.flatten_util.ravel_pytree(one)[0] for one in gradients)
    assert np.linalg.norm(actual - expected) < 0.03 * np.linalg.norm(expected)
