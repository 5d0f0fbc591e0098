"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions are counted from the row after padding's."""

from __future__ import annotations

import dataclasses
from typing import Any

from de_jax.interop.architectures import bert, kind
from de_jax.interop.architectures.kind import Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.bert import BertConfig
from de_jax.types import InputError

PAD_ID = 1
"""Where config.json does not say."""


def config_of(settings: Settings) -> BertConfig:
    return BertConfig(**settings.fields(bert.TABLE), position_offset=position_pad_id(settings) + 1)


def json_of(config: BertConfig, pad_id: int) -> dict[str, Any]:
    return kind.written(config, pad_id, bert.TABLE, "roberta", "RobertaModel", hidden_act="gelu")


def origins_of(config: BertConfig, pad_id: int) -> dict[str, Origin]:
    return bert.tables_of(pad_id) | kind.layers(config.num_layers, "encoder.layer", bert.MAPS, bert.NORMS)


def position_pad_id(settings: Settings) -> int:
    pad_id = settings.values.get("pad_token_id", PAD_ID)
    rows = min(settings.size("vocab_size"), settings.size("max_position_embeddings") - 1)
    if not isinstance(pad_id, int) or isinstance(pad_id, bool) or not 0 <= pad_id < rows:
        raise InputError(
            f"{settings.file}: pad_token_id is {pad_id!r}; it must be a row of both tables that leaves positions for texts."
        )
    return pad_id


KIND = dataclasses.replace(
    bert.KIND,
    model_types=("roberta", "xlm-roberta", "camembert"),
    config_of=config_of,
    origins_of=origins_of,
    json_of=json_of,
    holds=lambda config, pad_id: bert.is_plain(config) and config.position_offset == pad_id + 1,
    position_pad_id=position_pad_id,
)
