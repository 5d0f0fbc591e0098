"""Qwen3 and Qwen3-Embedding: Llama whose queries and keys are normalised, head by head."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import llama, rotary
from de_jax.interop.architectures.kind import Settings
from de_jax.models.rotary import RotaryConfig

HEAD_DIM, KV_HEADS = 128, 32

KEYS = llama.keys("is_causal attention_bias layer_types", "sliding_window max_window_layers", {"use_sliding_window": (False,)})


def config_of(settings: Settings) -> RotaryConfig:
    rotary.require_global(settings)
    settings = settings._replace(values={"head_dim": HEAD_DIM, **settings.values})
    return RotaryConfig(
        **llama.fields(settings, kv_heads=KV_HEADS), qk_norm=True, attention_bias=settings.flag("attention_bias", False)
    )


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, "layer_types": rotary.layer_types(config), "use_sliding_window": False}
    return {**llama.values(config, pad_id, "qwen3", "Qwen3Model"), **own}


KIND = rotary.encoder_kind("qwen3", KEYS, config_of, json_of, llama.origins_of, heads=llama.HEADS)
