"""GTE's BERT (Zhang et al. 2024): rotary positions, gated layers, fused kernels and BERT's norms; as transformers 5 has it."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import kind, nomic, rotary
from de_jax.interop.architectures.kind import Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig

BASE = 160_000.0
MAX_POSITIONS = 8192


def config_of(settings: Settings) -> RotaryConfig:
    activation = settings.values.get("hidden_act", "gelu")
    settings.require("hidden_act", activation, "gelu", "silu")
    return RotaryConfig(
        **nomic.fields(settings, BASE, 1),
        max_positions=settings.size("max_position_embeddings", MAX_POSITIONS),
        activation=activation,
        attention_bias=True,
        mlp_out_bias=True,
    )


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    return {"model_type": "gte", "architectures": ["GteModel"], **nomic.values(config, pad_id)}


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    origins = nomic.embedder_origins(config, pad_id, "embeddings.LayerNorm")
    for index in range(config.num_layers):
        ours, theirs = f"encoder/layers_{index}", f"encoder.layer.{index}"
        for which, name in enumerate(("query", "key", "value")):
            origins |= kind.linear(f"{ours}/attention/{name}", f"{theirs}.attention.qkv_proj", part=(which, 3))
        origins |= kind.linear(f"{ours}/attention/out", f"{theirs}.attention.o_proj")
        origins |= kind.norm(f"{ours}/attention_layer_norm", f"{theirs}.attn_ln")
        for which, name in enumerate(("wi_1", "wi_0")):
            origins |= kind.linear(f"{ours}/mlp/{name}", f"{theirs}.mlp.up_gate_proj", bias=False, part=(which, 2))
        origins |= kind.linear(f"{ours}/mlp/wo", f"{theirs}.mlp.down_proj")
        origins |= kind.norm(f"{ours}/mlp_layer_norm", f"{theirs}.mlp_ln")
    return origins


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
