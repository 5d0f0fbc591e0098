"""Qwen2 and GTE-Qwen2: Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import llama, rotary
from de_jax.interop.architectures.kind import Settings
from de_jax.models.rotary import RotaryConfig

KEYS = llama.keys("is_causal layer_types", "sliding_window max_window_layers", use_sliding_window=(False,))


def config_of(settings: Settings) -> RotaryConfig:
    rotary.require_global(settings)
    return RotaryConfig(**llama.fields(settings, num_key_value_heads=32), attention_bias=True, out_bias=False)


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    sliding = {"layer_types": rotary.layer_types(config), "use_sliding_window": False}
    return llama.json_as(config, pad_id, "qwen2", "Qwen2Model", **sliding)


KIND = rotary.encoder_kind("qwen2", KEYS, config_of, json_of, llama.origins_of, heads=llama.HEADS)
