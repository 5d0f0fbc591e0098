"""GTE's BERT (Zhang et al. 2024): rotary positions, gated layers, fused kernels and BERT's norms; as transformers 5 has it."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import nomic, rotary
from de_jax.interop.architectures.kind import Maps, Setting, Settings, parts
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig

TABLE = nomic.TABLE | {
    "max_positions": Setting("max_position_embeddings", 8192),
    "num_token_types": Setting("type_vocab_size", 1, options={"at_least": 0}),
    "dropout_rate": Setting("hidden_dropout_prob", 0.1, "share"),
}
MAPS: Maps = {
    **parts("attention.qkv_proj", "attention/query", "attention/key", "attention/value"),
    "attention/out": "attention.o_proj",
    **parts("mlp.up_gate_proj", "mlp/wi_1", "mlp/wi_0"),
    "mlp/wo": "mlp.down_proj",
}
NORMS = {"attention_layer_norm": "attn_ln", "mlp_layer_norm": "mlp_ln"}


def config_of(settings: Settings) -> RotaryConfig:
    found = nomic.fields(settings, TABLE, 160_000.0, "gelu", "silu")
    return RotaryConfig(**found, attention_bias=True, mlp_out_bias=True)


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    return nomic.json_as(config, pad_id, "gte", "GteModel")


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    return nomic.embedder_origins(config, pad_id, "embeddings.LayerNorm") | rotary.layers(config, "encoder.layer", MAPS, NORMS)


# The files of the model's own code have "new." before the encoder's names.
KIND = rotary.encoder_kind(
    "gte",
    nomic.KEYS,
    config_of,
    json_of,
    origins_of,
    heads=(r"(lm_head|pooler|classifier)\..*",),
    prefix="gte|new",
    is_renamed=True,
)
