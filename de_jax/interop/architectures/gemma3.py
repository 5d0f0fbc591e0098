"""Gemma 3's text model and EmbeddingGemma: norms before and after each half, local layers with positions of their own."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import kind, rotary
from de_jax.interop.architectures.kind import Keys, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig

NORMS = {
    "pre_attention_layer_norm": "input_layernorm",
    "post_attention_layer_norm": "post_attention_layernorm",
    "pre_mlp_layer_norm": "pre_feedforward_layernorm",
    "post_mlp_layer_norm": "post_feedforward_layernorm",
}
GLOBAL_EVERY = 6
GLOBAL_BASE, LOCAL_BASE = 1_000_000.0, 10_000.0
READ = (
    kind.READ
    + """hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size max_position_embeddings
rms_norm_eps attention_bias attention_dropout query_pre_attn_scalar sliding_window sliding_window_pattern layer_types
rope_(theta|local_base_freq|scaling|parameters)"""
)
KEYS = Keys(
    read=READ + " use_bidirectional_attention",
    harmless=kind.HARMLESS + " final_logit_softcapping _sliding_window_pattern",  # written beside layer_types, never read
    fixed={**kind.FIXED, "hidden_activation": ("gelu_pytorch_tanh",), "attn_logit_softcapping": (None,)},
    refused=kind.REFUSED,
)


def fields(settings: Settings) -> dict[str, Any]:
    """The settings common to the Gemma family's files, as fields of `RotaryConfig`."""
    head_dim, scalar = settings.size("head_dim", 256), settings.positive("query_pre_attn_scalar", 256.0)
    of_weights = settings.share("attention_dropout", 0.0)
    return {
        "vocab_size": settings.size("vocab_size"),
        "model_dim": settings.size("hidden_size"),
        "num_layers": settings.size("num_hidden_layers"),
        "num_heads": settings.size("num_attention_heads", 8),
        "num_kv_heads": settings.size("num_key_value_heads", 4),
        "head_dim": head_dim,
        "mlp_dim": settings.size("intermediate_size"),
        "activation": "gelu_tanh",
        "norm": "rms",
        "norm_epsilon": settings.epsilon("rms_norm_eps", 1e-6),
        "norm_embeddings": False,
        "post_norms": True,
        "attention_bias": settings.flag("attention_bias", False),
        "scale_embeddings": True,
        "query_scale": None if scalar == head_dim else scalar**-0.5,
        "attention_dropout_rate": of_weights or None,
        "dtype": "float32",
    }


def values(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    """The inverse of `fields`, and the types of layers."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_positions,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": config.attention_bias,
        "attention_dropout": config.weights_dropout_rate,
        "query_pre_attn_scalar": round(config.query_scale**-2) if config.query_scale else config.head_dim,
        "layer_types": rotary.layer_types(config),
        "use_cache": False,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


def third_fields(settings: Settings) -> dict[str, Any]:
    """`fields`, and those of the family's third generation."""
    pattern = settings.size("sliding_window_pattern", GLOBAL_EVERY)
    every, first = rotary.global_layers(settings, settings.size("num_hidden_layers"), (pattern, pattern - 1))
    return {
        **fields(settings),
        "max_positions": settings.size("max_position_embeddings", 131_072),
        "qk_norm": True,
        "global_every": every,
        "first_global": first,
        **rotary.rope(settings, rotary.GLOBAL, "rope_theta", GLOBAL_BASE, "linear"),
        "local_rope_base": rotary.rope(settings, rotary.LOCAL, "rope_local_base_freq", LOCAL_BASE)["rope_base"],
    }


def third_values(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    """The inverse of `third_fields`."""
    return {
        **values(config, pad_id),
        "rope_parameters": {
            rotary.GLOBAL: {"rope_theta": config.rope_base, **rotary.scaling_json(config)},
            rotary.LOCAL: {"rope_theta": config.local_rope_base, "rope_type": "default"},
        },
    }


def config_of(settings: Settings) -> RotaryConfig:
    causal = not settings.flag("use_bidirectional_attention", False)
    window = settings.size("sliding_window", 4096, at_least=2)
    return RotaryConfig(**third_fields(settings), causal=causal, window=window - 1 if causal else window // 2)


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3TextModel"],
        **third_values(config, pad_id),
        "sliding_window": config.window + 1 if config.causal else 2 * config.window,
        "use_bidirectional_attention": not config.causal,
    }


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    return rotary.llama_origins(config, pad_id, norms=NORMS, added=1.0)


KIND = rotary.encoder_kind(
    "gemma3_text", KEYS, config_of, json_of, origins_of, heads=(r"(lm_head|score|classifier|qa_outputs)\..*",)
)
