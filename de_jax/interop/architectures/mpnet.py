"""MPNet: BERT without token types, with T5's relative position bias, its padding always 1."""

from __future__ import annotations

import dataclasses
from typing import Any

from de_jax.interop.architectures import bert, kind
from de_jax.interop.architectures.kind import Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.bert import BertConfig

PAD_ID = 1
"""Whatever the value in config.json, positions are counted from the one after it and the token 1 has none."""
NUM_BUCKETS = 32
"""Whatever the value in config.json, transformers puts distances into so many."""
OWN = {"hidden_act": "gelu", "relative_attention_num_buckets": NUM_BUCKETS}
MAPS = {**{f"attention/{name}": f"attention.attn.{name[0]}" for name in ("query", "key", "value", "out")}, **bert.FEED_FORWARD}
NORMS = {**bert.NORMS, "attention_layer_norm": "attention.LayerNorm"}


def config_of(settings: Settings) -> BertConfig:
    settings.require("pad_token_id", settings.values.get("pad_token_id", PAD_ID), PAD_ID)
    return BertConfig(**settings.fields(bert.SIZES), position_offset=PAD_ID + 1, num_token_types=0, num_buckets=NUM_BUCKETS)


def json_of(config: BertConfig, pad_id: int) -> dict[str, Any]:
    return kind.written(config, PAD_ID, bert.SIZES, "mpnet", "MPNetModel", **OWN)


def origins_of(config: BertConfig, pad_id: int) -> dict[str, Origin]:
    bias = Origin("encoder.relative_attention_bias.weight", transposed=True)
    tables = bert.tables_of(pad_id, has_types=False) | {"encoder/relpos_bias/rel_embedding": bias}
    return tables | kind.layers(config.num_layers, "encoder.layer", MAPS, NORMS)


def holds(config: Any, pad_id: int) -> bool:
    is_mpnet = isinstance(config, BertConfig) and (config.num_buckets, config.num_token_types) == (NUM_BUCKETS, 0)
    return is_mpnet and config.position_offset == pad_id + 1 == PAD_ID + 1


KIND = dataclasses.replace(
    bert.KIND,
    model_types=("mpnet",),
    keys=kind.keys(bert.SIZES, **bert.FIXED, relative_attention_num_buckets=(NUM_BUCKETS,)),
    config_of=config_of,
    origins_of=origins_of,
    json_of=json_of,
    holds=holds,
    position_pad_id=lambda settings: PAD_ID,
)
