"""MPNet: BERT without token types, with T5's relative position bias, its padding always 1."""

from __future__ import annotations

import dataclasses
from typing import Any

from de_jax.interop.architectures import bert, kind
from de_jax.interop.architectures.kind import Keys, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.bert import BertConfig

PAD_ID = 1
"""Whatever config.json says, positions are counted from the one after it and the token 1 has none."""
NUM_BUCKETS = 32
"""Whatever config.json says, transformers puts distances into so many."""
KEYS = Keys(
    read=kind.READ
    + """ hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings layer_norm_eps
hidden_dropout_prob attention_probs_dropout_prob""",
    harmless=kind.HARMLESS,
    fixed={
        **kind.FIXED,
        "hidden_act": ("gelu",),
        "relative_attention_num_buckets": (NUM_BUCKETS,),
        "position_embedding_type": ("absolute",),
    },
    refused=kind.REFUSED,
)


def config_of(settings: Settings) -> BertConfig:
    settings.require("pad_token_id", settings.values.get("pad_token_id", PAD_ID), PAD_ID)
    return BertConfig(**bert.sizes_of(settings), position_offset=PAD_ID + 1, num_token_types=0, num_buckets=NUM_BUCKETS)


def json_of(config: BertConfig, pad_id: int) -> dict[str, Any]:
    return {
        **bert.sizes_json(config),
        "model_type": "mpnet",
        "architectures": ["MPNetModel"],
        "relative_attention_num_buckets": NUM_BUCKETS,
        "pad_token_id": PAD_ID,
    }


def origins_of(config: BertConfig, pad_id: int) -> dict[str, Origin]:
    origins = bert.tables_of(pad_id, has_types=False)
    origins["encoder/relpos_bias/rel_embedding"] = Origin("encoder.relative_attention_bias.weight", transposed=True)
    for index in range(config.num_layers):
        ours, theirs = f"encoder/layers_{index}", f"encoder.layer.{index}"
        for name, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
            origins |= kind.linear(f"{ours}/attention/{name}", f"{theirs}.attention.attn.{letter}")
        origins |= kind.norm(f"{ours}/attention_layer_norm", f"{theirs}.attention.LayerNorm")
        origins |= bert.feed_forward_of(ours, theirs)
    return origins


def holds(config: Any, pad_id: int) -> bool:
    is_mpnet = isinstance(config, BertConfig) and (config.num_buckets, config.num_token_types) == (NUM_BUCKETS, 0)
    return is_mpnet and config.position_offset == pad_id + 1 == PAD_ID + 1


KIND = dataclasses.replace(
    bert.KIND,
    model_types=("mpnet",),
    keys=KEYS,
    config_of=config_of,
    origins_of=origins_of,
    json_of=json_of,
    holds=holds,
    position_pad_id=lambda settings: PAD_ID,
)
