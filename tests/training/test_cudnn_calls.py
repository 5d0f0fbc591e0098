"""The step that is compiled for an NVIDIA GPU calls cuDNN's attention in every layer, there and back; lowered without a GPU."""

import jax
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from de_jax.configurables import read_recipe
from de_jax.models import attention
from de_jax.types import Batch

SIZES = {
    "vocab_size": 128,
    "model_dim": 64,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_dim": 64,
    "dropout_rate": 0.0,
    "dtype": "'bfloat16'",
}


@pytest.mark.parametrize(
    ("model", "encoder", "more"),
    [
        ("t5_1_1_tiny", "T5Config", {"head_dim": 32}),
        ("bert_base", "BertConfig", {}),
        ("modernbert_base", "RotaryConfig", {"head_dim": 32, "scan_layers": False}),
    ],
)
def test_every_layer_of_a_step_calls_cudnn(model, encoder, more, monkeypatch):
    monkeypatch.setattr(attention, "platform", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda *_: 91_000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda *_: None)
    settings = [f"{encoder}.{name}={value}" for name, value in {**SIZES, **more}.items()]
    recipe = read_recipe(["recipes/sde.gin", f"models/{model}.gin"], settings)
    state = jax.eval_shape(recipe.init)
    tokens, ids = np.ones((4, 64), np.int32), np.arange(4, dtype=np.int32)
    step = jax.jit(recipe.train_step(state.params))
    text = step.trace(state, Batch(tokens, tokens, ids, ids)).lower(lowering_platforms=("cuda",)).as_text()
    lines = [line for line in text.splitlines() if "custom_call @__cudnn$fmha" in line]
    backward = [line for line in lines if "Backward(" in line]
    assert (len(lines) - len(backward), len(backward)) == (2 * SIZES["num_layers"], 2 * SIZES["num_layers"])
