"""EuroBERT: Llama in both directions."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import llama, rotary
from de_jax.interop.architectures.kind import Settings
from de_jax.models.rotary import RotaryConfig

KEYS = llama.keys(
    "attention_bias mlp_bias", "auto_map (bos|eos|pad|mask)_token cl(f|assifier)_pooling hidden_dropout", refused={}
)  # the published files name the code that transformers has taken in since


def config_of(settings: Settings) -> RotaryConfig:
    fields = llama.fields(settings, llama.TABLE | llama.BIASES, rms_norm_eps=1e-5)
    return RotaryConfig(**fields | {"causal": False})


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    values = llama.json_as(config, pad_id, "eurobert", "EuroBertModel", **llama.biases_json(config))
    return {name: value for name, value in values.items() if name != "is_causal"}


KIND = rotary.encoder_kind("eurobert", KEYS, config_of, json_of, llama.origins_of, heads=llama.HEADS)
