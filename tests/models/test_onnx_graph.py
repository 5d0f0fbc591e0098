"""The graph of every kind of encoder gives in onnxruntime what the tower gives here."""

import dataclasses

import numpy as np
import pytest
from often import often
from random_params import tower_params

from de_jax.models import onnx_graph
from de_jax.models.bert import BertConfig
from de_jax.models.rotary import RotaryConfig
from de_jax.models.static import StaticConfig
from de_jax.models.t5 import T5Config
from de_jax.models.tower import Tower, TowerConfig
from de_jax.types import InputError

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

SIZES = {"vocab_size": 60, "model_dim": 16, "num_layers": 3, "num_heads": 4, "mlp_dim": 24, "dtype": "float32"}
ROTARY = {**SIZES, "head_dim": 6}
GEMMA = {"activation": "gelu_tanh", "norm": "rms", "norm_embeddings": False, "post_norms": True, "qk_norm": True}
GEMMA |= {"scale_embeddings": True, "unscaled_token": 7, "rope_factor": 8.0, "attention_cap": 5.0, "query_scale": 0.3}
LLAMA = {"activation": "silu", "norm": "rms", "norm_embeddings": False, "causal": True, "global_every": 1, "num_kv_heads": 1}
LLAMA |= {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_length": 100, "attention_bias": True, "out_bias": False}
NOMIC = {"norm_bias": True, "norm_sums": True, "norm_embeddings": False, "num_token_types": 2, "mlp_bias": True}
YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_length": 64, "rope_many_turns": 32.0}
ENCODERS = {
    "t5": T5Config(**SIZES, head_dim=6),
    "umt5": T5Config(**SIZES, head_dim=5, activation="relu", bias_per_layer=True, num_buckets=12, max_distance=20),
    "bert": BertConfig(**SIZES, max_positions=600),
    "mpnet": BertConfig(**SIZES, max_positions=640, position_offset=2, num_token_types=0, num_buckets=32, norm_epsilon=1e-5),
    "many_buckets": BertConfig(**SIZES, max_positions=640, num_buckets=500),
    "no_layers": BertConfig(**{**SIZES, "num_layers": 0}, max_positions=640),
    "modernbert": RotaryConfig(**ROTARY, window=5),
    "t5gemma": RotaryConfig(**ROTARY, **GEMMA, num_kv_heads=2, window=9, window_after=3),
    "llama": RotaryConfig(**ROTARY, **LLAMA),
    "static": StaticConfig(vocab_size=60, model_dim=8),
    "nomic": RotaryConfig(**ROTARY, **NOMIC, **YARN, causal=True, global_every=2, first_global=1, window=4),
}
POOLINGS = ("mean", "first", "last", "max", "mean_sqrt_len", "weightedmean")
HEADS = {
    "plain": {"projection_dim": None, "normalize": False},
    "linear": {"projection_dim": 12},
    "tanh": {"projection_dim": 12, "projection_bias": True, "projection_activation": "tanh"},
    "relu": {"projection_dim": 12, "projection_activation": "relu"},
    "gelu": {"projection_dim": 12, "projection_activation": "gelu"},
    "residual": {"projection_dim": 8, "projection_activation": "gelu", "projection_residual": True},
    "residual of another size": {"projection_dim": 12, "projection_activation": "tanh", "projection_residual": True},
    "norm alone": {"projection_dim": None, "projection_norm": True},
    "norm": {"projection_dim": 12, "projection_bias": True, "projection_norm": True, "normalize": False},
}


def compared(config, precision="float32", lengths=((1,), (600, 1, 37), (2, 13, 5, 13)), padding_first=False):
    """The largest difference from the tower, over the largest value, for batches of texts of these lengths."""
    params = tower_params(config)["params"]
    model = onnx_graph.model_of(config, params, precision)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng, worst = np.random.default_rng(0), 0.0
    for batch in lengths:
        mask = np.arange(max(batch))[None] < np.array(batch)[:, None]
        tokens = np.where(mask, rng.integers(1, 60, mask.shape), 0)
        expected = np.asarray(Tower(config).apply({"params": params}, tokens.astype(np.int32)))[:, 0]
        fed = [tokens, mask]
        if padding_first:
            fed = [np.stack([np.roll(row, -size) for row, size in zip(array, batch, strict=True)]) for array in fed]
        feeds = dict(zip(("input_ids", "attention_mask"), (array.astype(np.int64) for array in fed), strict=True))
        found, hidden = session.run(None, feeds)
        assert hidden.shape == (*tokens.shape, config.encoder.model_dim)
        worst = max(worst, float(np.abs(found - expected).max() / np.abs(expected).max()))
    return worst


@pytest.mark.parametrize("kind", often(ENCODERS, "t5", "bert"))
def test_every_kind_is_equal_in_batches_of_mixed_lengths(kind):
    assert compared(TowerConfig(ENCODERS[kind], projection_dim=12)) < 1e-5


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("start", [0, 2])
def test_every_pooling_is_equal(pooling, start):
    tower = TowerConfig(ENCODERS["static"], pooling=pooling, pooling_start=start, **HEADS["plain"])
    assert compared(tower, lengths=((3,), (60, 4, 37))) < 1e-5


@pytest.mark.parametrize("head", often(HEADS, "tanh", "residual", "norm"))
def test_every_head_is_equal(head):
    assert compared(TowerConfig(ENCODERS["static"], pooling="first", **HEADS[head])) < 1e-5


@pytest.mark.parametrize("kind", often(["bert", "modernbert", "t5"], "bert"))
def test_padding_may_stand_in_front(kind):
    assert compared(TowerConfig(ENCODERS[kind], pooling="last", **HEADS["linear"]), padding_first=True) < 1e-5


@pytest.mark.parametrize("kind", often(["t5", "bert", "t5gemma"], "bert"))
def test_fewer_bits_are_close_and_smaller(kind):
    config = TowerConfig(dataclasses.replace(ENCODERS[kind], vocab_size=3000), projection_dim=12)
    assert compared(config, "float16") < 5e-3
    assert compared(config, "int8") < 0.1
    params = tower_params(config)["params"]
    whole, half, codes = (onnx_graph.model_of(config, params, one).ByteSize() for one in ("float32", "float16", "int8"))
    assert half < 0.65 * whole
    assert codes < 0.5 * whole


def test_an_embedding_in_int8_is_the_same_beside_other_texts():
    config = TowerConfig(ENCODERS["bert"], projection_dim=12)
    model = onnx_graph.model_of(config, tower_params(config)["params"], "int8")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(1, 60, (5, 9))
    whole, alone = (session.run(None, {"input_ids": one, "attention_mask": one * 0 + 1})[0] for one in (ids, ids[3:4]))
    np.testing.assert_allclose(whole[3], alone[0], atol=1e-6)


def test_what_onnx_cannot_hold_is_refused_by_name():
    class Own:
        vocab_size, model_dim, num_layers, max_length, dtype, is_gated = 9, 4, 1, None, "float32", False

    config = TowerConfig(ENCODERS["t5"], projection_dim=None)
    object.__setattr__(config, "encoder", Own())
    with pytest.raises(InputError, match="ONNX has no place for the encoder Own; it holds T5Config, BertConfig, RotaryConfig"):
        onnx_graph.model_of(config, {})
    config = TowerConfig(ENCODERS["t5"], projection_dim=None)
    params = tower_params(config)["params"]
    params["embedder"]["embedding"] = params["embedder"]["embedding"] * 1e6
    with pytest.raises(InputError, match=r"beyond float16's 65,504; export this model in float32 or int8"):
        onnx_graph.model_of(config, params, "float16")


def test_the_file_names_its_writer_and_its_precision():
    config = TowerConfig(ENCODERS["t5"], projection_dim=None)
    model = onnx_graph.model_of(config, tower_params(config)["params"], "int8", notes={"license": "mit"})
    assert (model.producer_name, model.opset_import[0].version) == ("de_jax", onnx_graph.OPSET)
    assert {entry.key: entry.value for entry in model.metadata_props} == {"precision": "int8", "license": "mit"}
