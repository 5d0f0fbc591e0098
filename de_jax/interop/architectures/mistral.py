"""Mistral and E5-Mistral: Llama whose layers may all be local."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import llama, rotary
from de_jax.interop.architectures.kind import Settings
from de_jax.models.rotary import RotaryConfig

WINDOW = 4096

KEYS = llama.keys("is_causal sliding_window")


def config_of(settings: Settings) -> RotaryConfig:
    fields = llama.fields(settings, num_key_value_heads=8)
    if settings.values.get("sliding_window", WINDOW) is None:
        return RotaryConfig(**fields)
    window = settings.size("sliding_window", WINDOW, at_least=2)
    if "rope_scaling" in fields:
        settings.require("rope_type", fields["rope_scaling"], "default")  # local layers have no other
    return RotaryConfig(
        **fields
        | {
            "global_every": fields["num_layers"] + 1,
            "first_global": fields["num_layers"],
            "window": window - 1 if fields["causal"] else window,
            "local_rope_base": fields["rope_base"],
        }
    )


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    own: dict[str, Any] = {"sliding_window": None}
    if rotary.LOCAL in rotary.layer_types(config):
        window = config.window + 1 if config.causal else config.window
        own = {"rope_theta": config.local_rope_base, "sliding_window": window}
    return llama.json_as(config, pad_id, "mistral", "MistralModel", **own)


KIND = rotary.encoder_kind("mistral", KEYS, config_of, json_of, llama.origins_of, heads=llama.HEADS)
