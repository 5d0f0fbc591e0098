"""BERT, and what RoBERTa and MPNet share with it."""

from __future__ import annotations

import re
from typing import Any

from de_jax.interop.architectures import kind
from de_jax.interop.architectures.kind import Kind, Setting, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.bert import BertConfig

SIZES = kind.SIZES | {
    "num_layers": Setting("num_hidden_layers", options={"at_least": 0}),
    "max_positions": Setting("max_position_embeddings"),
    "norm_epsilon": Setting("layer_norm_eps", 1e-12, "epsilon"),
    "dropout_rate": Setting("hidden_dropout_prob", 0.1, "share"),
    "attention_dropout_rate": Setting("attention_probs_dropout_prob", 0.1, "share", "weights_dropout_rate"),
}
"""What BERT, RoBERTa and MPNet have alike."""
TABLE = SIZES | {"num_token_types": Setting("type_vocab_size", 2)}
FIXED: dict[str, Any] = {"hidden_act": ("gelu",), "position_embedding_type": ("absolute",)}
HEADS = (r"(pooler|cls|lm_head|classifier|qa_outputs)\..*", r"embeddings\.(position|token_type)_ids")
FEED_FORWARD = {"mlp/wi": "intermediate.dense", "mlp/wo": "output.dense"}
MAPS = {
    **{f"attention/{name}": f"attention.self.{name}" for name in ("query", "key", "value")},
    "attention/out": "attention.output.dense",
    **FEED_FORWARD,
}
NORMS = {"attention_layer_norm": "attention.output.LayerNorm", "mlp_layer_norm": "output.LayerNorm"}


def config_of(settings: Settings) -> BertConfig:
    return BertConfig(**settings.fields(TABLE), position_offset=0)


def json_of(config: BertConfig, pad_id: int) -> dict[str, Any]:
    """Without the rows of the position table before a text's first one, which BERT counts from 0."""
    length = config.max_positions - config.position_offset
    return kind.written(config, pad_id, TABLE, "bert", "BertModel", hidden_act="gelu", max_position_embeddings=length)


def origins_of(config: BertConfig, pad_id: int) -> dict[str, Origin]:
    tables = tables_of(pad_id, first_position=config.position_offset)
    return tables | kind.layers(config.num_layers, "encoder.layer", MAPS, NORMS)


def tables_of(pad_id: int, *, first_position: int = 0, has_types: bool = True) -> dict[str, Origin]:
    """The origins of an embedder; the position table's rows before `first_position` are not theirs."""
    types = {"embedder/token_type/embedding": Origin("embeddings.token_type_embeddings.weight")} if has_types else {}
    return {
        "embedder/embedding": Origin("embeddings.word_embeddings.weight", swapped_row=pad_id),
        "embedder/position/embedding": Origin("embeddings.position_embeddings.weight", first_row=first_position),
        **types,
        **kind.norm("embedder/norm", "embeddings.LayerNorm"),
    }


def own_name(name: str) -> str:
    """Heads put their encoder's name before it, and old norms have gamma and beta."""
    name = re.sub(r"^(bert|roberta|mpnet)\.", "", name)
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))


def is_plain(config: Any) -> bool:
    """Whether an encoder is a BERT or RoBERTa and not a related kind."""
    return isinstance(config, BertConfig) and config.num_token_types > 0 and not config.num_buckets


KIND = Kind(
    model_types=("bert",),
    keys=kind.keys(TABLE, harmless="directionality pooler_.*", **FIXED),
    config_of=config_of,
    origins_of=origins_of,
    json_of=json_of,
    holds=lambda config, pad_id: is_plain(config) and config.position_offset != pad_id + 1,
    own_name=own_name,
    heads=HEADS,
    kept=r"pooler\.dense\.(weight|bias)",
)
