"""Qwen3 and Qwen3-Embedding: causal, grouped heads whose queries and keys are normalised."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import kind, rotary
from de_jax.interop.architectures.kind import Kind, Settings
from de_jax.interop.config_keys import Keys
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig

NORMS = {"pre_attention_layer_norm": "input_layernorm", "pre_mlp_layer_norm": "post_attention_layernorm"}
BASE = 10_000.0
KEYS = Keys(
    read=kind.READ
    + """hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size max_position_embeddings
rms_norm_eps attention_bias attention_dropout layer_types rope_theta rope_parameters""",
    harmless=kind.HARMLESS + " sliding_window max_window_layers",
    fixed={**kind.FIXED, "hidden_act": ("silu",), "use_sliding_window": (False,), "rope_scaling": (None,)},
    refused=kind.REFUSED,
)


def config_of(settings: Settings) -> RotaryConfig:
    num_layers, num_heads = settings.size("num_hidden_layers"), settings.size("num_attention_heads")
    every, first = rotary.global_layers(settings, num_layers, (1, 0))
    settings.require("layer_types", (every, first), (1, 0))
    rotary.factor(settings, None)
    of_weights = settings.share("attention_dropout", 0.0)
    return RotaryConfig(
        vocab_size=settings.size("vocab_size"),
        model_dim=settings.size("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.size("num_key_value_heads", num_heads),
        head_dim=settings.size("head_dim", 128),
        mlp_dim=settings.size("intermediate_size"),
        max_positions=settings.size("max_position_embeddings", 32768),
        activation="silu",
        norm="rms",
        norm_epsilon=settings.epsilon("rms_norm_eps", 1e-6),
        norm_embeddings=False,
        qk_norm=True,
        attention_bias=settings.flag("attention_bias", False),
        causal=True,
        global_every=1,
        rope_base=rotary.base(settings, None, "rope_theta", BASE),
        attention_dropout_rate=of_weights or None,
        dtype="float32",
    )


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3Model"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": config.attention_bias,
        "attention_dropout": config.weights_dropout_rate,
        "layer_types": rotary.layer_types(config),
        "use_sliding_window": False,
        "rope_theta": config.rope_base,
        "use_cache": False,
        "tie_word_embeddings": True,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    return rotary.llama_origins(config, pad_id, norms=NORMS)


KIND = Kind(
    model_types=("qwen3",),
    keys=KEYS,
    config_of=config_of,
    origins_of=origins_of,
    json_of=json_of,
    holds=rotary.held_by(config_of, json_of),
    own_names=rotary.own_names,
    heads=(r"(lm_head|score)\..*",),
    is_shift_free=True,
)
