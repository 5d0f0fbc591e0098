"""Qwen3 and Qwen3-Embedding: Llama whose queries and keys are normalised, head by head."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import llama, rotary
from de_jax.interop.architectures.kind import Settings
from de_jax.models.rotary import RotaryConfig

KEYS = llama.keys("is_causal attention_bias layer_types", "sliding_window max_window_layers", use_sliding_window=(False,))


def config_of(settings: Settings) -> RotaryConfig:
    rotary.require_global(settings)
    fields = llama.fields(settings, num_key_value_heads=32, head_dim=128)
    return RotaryConfig(**fields, qk_norm=True, attention_bias=settings.flag("attention_bias", False))


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, "layer_types": rotary.layer_types(config), "use_sliding_window": False}
    return llama.json_as(config, pad_id, "qwen3", "Qwen3Model", **own)


KIND = rotary.encoder_kind("qwen3", KEYS, config_of, json_of, llama.origins_of, heads=llama.HEADS)
