"""T5 1.0 and 1.1, mT5 and umT5: the encoder, and the decoder of a generator."""

from __future__ import annotations

import re
from typing import Any

from de_jax.interop.architectures import kind
from de_jax.interop.architectures.kind import Keys, Kind, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.generator import START_ID, Generator
from de_jax.models.t5 import NORM_EPSILON, T5Config

ACTIVATIONS = {"relu": "relu", "gated-gelu": "gated_gelu"}
DENSE_ACTIVATIONS = {"relu": "relu", "gated-gelu": "gelu_new"}
"""What transformers makes of them, and writes down too."""
TABLE, COPY_OF_TABLE = "shared.weight", "encoder.embed_tokens.weight"
GENERATOR_TYPES = ("t5", "mt5")
LOGITS = "lm_head.weight"
DECODER_TABLE = "decoder.embed_tokens.weight"
"""The same table once more, in older folders."""
UNUSED_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""In older folders; no version of T5 uses it."""
KEYS = Keys(
    read=kind.READ
    + """ d_model num_layers num_heads d_kv d_ff relative_attention_num_buckets relative_attention_max_distance feed_forward_proj
dense_act_fn is_gated_act dropout_rate""",
    harmless=kind.HARMLESS + " num_decoder_layers scale_decoder_outputs scalable_attention n_positions",
    fixed={**kind.FIXED, "layer_norm_epsilon": (NORM_EPSILON,)},
    refused=kind.REFUSED,
)


def config_of(settings: Settings) -> T5Config:
    values, model_type = settings.values, settings.model_type
    activation = values.get("feed_forward_proj", "relu" if model_type == "t5" else "gated-gelu")
    settings.require("feed_forward_proj", activation, *ACTIVATIONS)
    settings.require("dense_act_fn", values.get("dense_act_fn", DENSE_ACTIVATIONS[activation]), DENSE_ACTIVATIONS[activation])
    is_gated = activation == "gated-gelu"
    settings.require("is_gated_act", values.get("is_gated_act", is_gated), is_gated)
    return T5Config(
        vocab_size=settings.size("vocab_size"),
        model_dim=settings.size("d_model"),
        num_layers=settings.size("num_layers", at_least=0),
        num_heads=settings.size("num_heads"),
        head_dim=settings.size("d_kv"),
        mlp_dim=settings.size("d_ff"),
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        num_buckets=settings.size("relative_attention_num_buckets", 32),
        max_distance=settings.size("relative_attention_max_distance", 128),
        bias_per_layer=model_type == "umt5",
        dropout_rate=settings.share("dropout_rate"),
        dtype="float32",
    )


def json_of(config: T5Config, pad_id: int = 0) -> dict[str, Any]:
    model_type = "umt5" if config.bias_per_layer else "t5"
    return {
        "model_type": model_type,
        "architectures": [f"{model_type.upper()}EncoderModel"],
        "vocab_size": config.vocab_size,
        "d_model": config.model_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "feed_forward_proj": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation),
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": NORM_EPSILON,
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": pad_id,
        "eos_token_id": 1,
        "dtype": "float32",
    }


def origins_of(config: T5Config, pad_id: int = 0) -> dict[str, Origin]:
    origins = {
        "embedder/embedding": Origin(TABLE, swapped_row=pad_id),
        "encoder/encoder_norm/scale": Origin("encoder.final_layer_norm.weight"),
    }
    origins |= _position_biases(config, "encoder", config.num_layers)
    for index in range(config.num_layers):
        ours, theirs = f"encoder/layers_{index}", f"encoder.block.{index}.layer"
        origins[f"{ours}/pre_attention_layer_norm/scale"] = Origin(f"{theirs}.0.layer_norm.weight")
        origins[f"{ours}/pre_mlp_layer_norm/scale"] = Origin(f"{theirs}.1.layer_norm.weight")
        origins |= _attention(f"{ours}/attention", f"{theirs}.0.SelfAttention")
        origins |= _feed_forward(config, f"{ours}/mlp", f"{theirs}.1.DenseReluDense")
    return origins


def own_name(name: str) -> str:
    """A stack saved alone lacks "encoder."; whole models may hold the table under two names, or be within one with a head."""
    name = name.removeprefix("transformer.")
    name = re.sub(r"^(?=(block|final_layer_norm|embed_tokens)\.)", "encoder.", name)
    return TABLE if name == COPY_OF_TABLE else name


def generator_origins(model: Generator) -> dict[str, Origin]:
    """Where transformers keeps each parameter of a T5 with its decoder (T5ForConditionalGeneration)."""
    found = origins_of(model.t5)
    num_layers = model.num_decoder_layers or model.t5.num_layers
    found |= _position_biases(model.t5, "decoder", num_layers)
    found["decoder/decoder_norm/scale"] = Origin("decoder.final_layer_norm.weight")
    if not model.tied_logits:
        found["decoder/logits_dense/kernel"] = Origin(LOGITS, transposed=True)
    norms = ("pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm")
    for index in range(num_layers):
        ours, theirs = f"decoder/layers_{index}", f"decoder.block.{index}.layer"
        for number, name in enumerate(norms):
            found[f"{ours}/{name}/scale"] = Origin(f"{theirs}.{number}.layer_norm.weight")
        found |= _attention(f"{ours}/self_attention", f"{theirs}.0.SelfAttention")
        found |= _attention(f"{ours}/encoder_decoder_attention", f"{theirs}.1.EncDecAttention")
        found |= _feed_forward(model.t5, f"{ours}/mlp", f"{theirs}.2.DenseReluDense")
    return found


def generator_json(model: Generator) -> dict[str, Any]:
    """What transformers calls the sizes of a T5 with its decoder."""
    return {
        **json_of(model.t5),
        "architectures": ["T5ForConditionalGeneration"],
        "num_decoder_layers": model.num_decoder_layers or model.t5.num_layers,
        "tie_word_embeddings": model.tied_logits if model.scaled_logits is None else model.scaled_logits,
        "is_encoder_decoder": True,
        "use_cache": True,
        "decoder_start_token_id": START_ID,
    }


def _position_biases(config: T5Config, stack: str, num_layers: int) -> dict[str, Origin]:
    places = [f"{stack}/layers_{index}" for index in range(num_layers)] if config.bias_per_layer else [stack]
    name = "layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        f"{place}/relpos_bias/rel_embedding": Origin(f"{stack}.block.{index}.{name}", transposed=True)
        for index, place in enumerate(places)
    }


def _attention(ours: str, theirs: str) -> dict[str, Origin]:
    letters = (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o"))
    return {f"{ours}/{name}/kernel": Origin(f"{theirs}.{letter}.weight", transposed=True) for name, letter in letters}


def _feed_forward(config: T5Config, ours: str, theirs: str) -> dict[str, Origin]:
    branches = ("wi_0", "wi_1", "wo") if config.activation == "gated_gelu" else ("wi", "wo")
    return {f"{ours}/{name}/kernel": Origin(f"{theirs}.{name}.weight", transposed=True) for name in branches}


KIND = Kind(
    model_types=("t5", "mt5", "umt5"),
    keys=KEYS,
    config_of=config_of,
    origins_of=origins_of,
    json_of=json_of,
    holds=lambda config, pad_id: isinstance(config, T5Config),
    own_name=own_name,
    heads=(r"(decoder|lm_head|classification_head|classifier|qa_outputs)\..*",),
)
