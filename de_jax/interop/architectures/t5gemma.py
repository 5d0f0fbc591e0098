"""The encoder of T5Gemma (Zhang et al. 2025): Gemma 2's layers in both directions, under an object of its own in config.json."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import gemma3, kind, rotary
from de_jax.interop.architectures.kind import Keys, Setting, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig
from de_jax.types import InputError

NORMS = {
    "pre_attention_layer_norm": "pre_self_attn_layernorm",
    "post_attention_layer_norm": "post_self_attn_layernorm",
    "pre_mlp_layer_norm": "pre_feedforward_layernorm",
    "post_mlp_layer_norm": "post_feedforward_layernorm",
}
GLOBAL_EVERY = 2
CAP = 50.0
BASE = 10_000.0
KEYS = Keys(
    read="model_type pad_token_id encoder dropout_rate attention_dropout",
    harmless=kind.HARMLESS + " decoder classifier_dropout_rate vocab_size initializer_range",
    fixed=kind.FIXED,
    refused=kind.REFUSED,
)
TABLE = gemma3.TABLE | {"max_positions": Setting("max_position_embeddings", 8192)}
ENCODER_KEYS = kind.keys(
    TABLE,
    "dropout_rate query_pre_attn_scalar attn_logit_softcapping sliding_window layer_types rope_(theta|scaling|parameters)",
    "final_logit_softcapping",
    {},
    **gemma3.FIXED,
)


def config_of(settings: Settings) -> RotaryConfig:
    encoder = settings.values.get("encoder")
    if not isinstance(encoder, dict):
        raise InputError(f"{settings.file}: encoder is {encoder!r}; it must be an object, the encoder's own settings.")
    kind.account(settings.file, encoder, ENCODER_KEYS)
    told = settings._replace(values=encoder)
    every, first = rotary.global_layers(told, told.size("num_hidden_layers"), (GLOBAL_EVERY, GLOBAL_EVERY - 1))
    cap = told.values.get("attn_logit_softcapping", CAP)
    positions = rotary.rope(told, None, "rope_theta", BASE)
    return RotaryConfig(
        **gemma3.fields(told, TABLE) | dropout(settings),
        attention_cap=None if cap is None else told.positive("attn_logit_softcapping", CAP),
        global_every=every,
        first_global=first,
        window=told.size("sliding_window", 4096),
        **positions,
        local_rope_base=positions["rope_base"],
    )


def dropout(settings: Settings) -> dict[str, Any]:
    """The rates of both halves, which stand beside their own settings, as fields of `RotaryConfig`."""
    rate, of_weights = settings.share("dropout_rate", 0.0), settings.share("attention_dropout", 0.0)
    return {"dropout_rate": rate, "attention_dropout_rate": of_weights if of_weights != rate else None}


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    base = config.rope_base if rotary.GLOBAL in rotary.layer_types(config) else config.local_rope_base
    own: dict[str, Any] = {"attn_logit_softcapping": config.attention_cap, "sliding_window": config.window, "rope_theta": base}
    encoder = gemma3.json_as(config, pad_id, "t5_gemma_module", dropout_rate=config.dropout_rate, **own)
    return {
        "model_type": "t5gemma",
        "architectures": ["T5GemmaEncoderModel"],
        "is_encoder_decoder": False,
        "dropout_rate": config.dropout_rate,
        "attention_dropout": config.weights_dropout_rate,
        "encoder": encoder,
        "decoder": encoder,  # transformers requires this key, but the encoder model has no decoder
        "vocab_size": config.vocab_size,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    return rotary.llama_origins(config, pad_id, norms=NORMS, added=1.0, prefix="encoder.")


KIND = rotary.encoder_kind("t5gemma", KEYS, config_of, json_of, origins_of, heads=(r"(decoder|lm_head|score|classifier)\..*",))
