"""The step that is compiled for an NVIDIA GPU calls the kernels of attention in every layer, and holds no scores of all pairs."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from de_jax.configurables import read_recipe
from de_jax.models import attention, layers
from de_jax.training.mesh import hlo, plan, sharding
from de_jax.training.mesh.sharding import AXES
from de_jax.training.step.train_step import batch_shapes
from de_jax.types import Batch

LENGTH, ROWS, LAYERS, HEADS = 128, 12, 2, 2
SIZES = {"vocab_size": 128, "model_dim": 64, "num_layers": LAYERS, "num_heads": HEADS, "mlp_dim": 64, "dropout_rate": 0.0}
MODELS = [
    ("t5_1_1_tiny", "T5Config", {"head_dim": 32}, 4),  # of kernels in a layer: forward, of queries, of keys and of the bias
    ("bert_base", "BertConfig", {"dropout_rate": 0.1}, 3),
    ("modernbert_base", "RotaryConfig", {"head_dim": 32, "scan_layers": False}, 3),
]
H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")


def recipe_of(model, encoder, more, *settings):
    settings = [*(f"{encoder}.{name}={value}" for name, value in {**SIZES, "dtype": "'bfloat16'", **more}.items()), *settings]
    return read_recipe(["recipes/sde.gin", f"models/{model}.gin"], settings)


def scores(text, rows=2 * ROWS, heads=HEADS):
    """Arrays of a value for each pair of tokens of each row, queries and documents together, in the text of a program."""
    return re.findall(rf"(?<!\d){rows}[x,](?:{heads}|1)[x,]{LENGTH}[x,]{LENGTH}(?!\d)", text)


@pytest.mark.parametrize(("model", "encoder", "more", "num_kernels"), MODELS)
def test_every_layer_of_a_step_calls_the_kernels(model, encoder, more, num_kernels, monkeypatch):
    monkeypatch.setattr(attention, "platform", lambda: "gpu")
    recipe = recipe_of(model, encoder, more)
    state = jax.eval_shape(recipe.init)
    tokens, ids = np.ones((ROWS, LENGTH), np.int32), np.arange(ROWS, dtype=np.int32)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 1, 1), AXES, (AxisType.Auto,) * 3, abstract_device=H100)):
        step = jax.jit(recipe.train_step(state.params)).trace(state, Batch(tokens, tokens, ids, ids))
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @__gpu\$xla\.gpu\.triton", text)) == LAYERS * num_kernels
    assert not scores(text)


def test_a_plain_step_holds_the_scores():
    recipe = recipe_of(*MODELS[0][:3])
    state = jax.eval_shape(recipe.init)
    tokens, ids = np.ones((ROWS, LENGTH), np.int32), np.arange(ROWS, dtype=np.int32)
    assert scores(jax.jit(recipe.train_step(state.params)).lower(state, Batch(tokens, tokens, ids, ids)).as_text())


@pytest.mark.parametrize("mesh", ["make_mesh.fsdp=2", "make_mesh.tensor=2"])
@pytest.mark.soak
def test_a_step_compiled_for_h100s_has_them_on_each(mesh):
    if not plan.compiles_for_gpus():
        pytest.skip("JAX's CUDA plugin compiles for GPUs")
    model, encoder, more, num_kernels = MODELS[0]
    recipe = recipe_of(model, encoder, more, mesh)
    mesh, state = recipe.devices.mesh(devices=plan.open_topology("h100:2").devices), recipe.check()
    shardings = sharding.state_shardings(state, mesh, recipe.devices.sharding_rules)
    step = sharding.compiled_step(recipe.train_step(state.params), shardings, mesh)
    batch = batch_shapes(batch_size=2 * ROWS, query_length=LENGTH, doc_length=LENGTH)
    with layers.compiling_for("gpu"):
        lowered = step.lower(sharding.with_shardings(state, shardings), batch)
    text = lowered.compile().as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == LAYERS * num_kernels
    rows, heads = (4 * ROWS, HEADS // 2) if mesh.shape["tensor"] == 2 else (2 * ROWS, HEADS)
    assert re.search(rf"bf16\[{rows},{LENGTH},{heads},32\]", text)
    assert not scores(text, rows, heads)
    of_kernels = LAYERS * (2 + 3 + 4 + 2) * 2 * rows * heads * LENGTH**2 * 32
    assert hlo.read_costs(text, 2).flops - hlo.read_costs(text.replace("flops=", ""), 2).flops == of_kernels
