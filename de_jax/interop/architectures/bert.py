"""BERT, and what RoBERTa and MPNet share with it."""

from __future__ import annotations

import re
from typing import Any

from de_jax.interop.architectures import kind
from de_jax.interop.architectures.kind import Keys, Kind, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.bert import BertConfig

KEYS = Keys(
    read=kind.READ
    + """ hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings type_vocab_size layer_norm_eps
hidden_dropout_prob attention_probs_dropout_prob""",
    harmless=kind.HARMLESS + " directionality pooler_.*",
    fixed={**kind.FIXED, "hidden_act": ("gelu",), "position_embedding_type": ("absolute",)},
    refused=kind.REFUSED,
)
HEADS = (r"(pooler|cls|lm_head|classifier|qa_outputs)\..*", r"embeddings\.(position|token_type)_ids")


def config_of(settings: Settings) -> BertConfig:
    return BertConfig(
        **sizes_of(settings),
        position_offset=0,
        num_token_types=settings.size("type_vocab_size", 2),
    )


def sizes_of(settings: Settings) -> dict[str, Any]:
    """The fields that BERT, RoBERTa and MPNet have alike."""
    dropped, of_weights = (settings.share(name) for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"))
    return {
        "vocab_size": settings.size("vocab_size"),
        "model_dim": settings.size("hidden_size"),
        "num_layers": settings.size("num_hidden_layers", at_least=0),
        "num_heads": settings.size("num_attention_heads"),
        "mlp_dim": settings.size("intermediate_size"),
        "max_positions": settings.size("max_position_embeddings"),
        "norm_epsilon": settings.epsilon("layer_norm_eps", 1e-12),
        "dropout_rate": dropped,
        "attention_dropout_rate": None if of_weights == dropped else of_weights,
        "dtype": "float32",
    }


def json_of(config: BertConfig, pad_id: int) -> dict[str, Any]:
    """Without the rows of the position table before a text's first one, which BERT counts from 0."""
    return {
        **sizes_json(config),
        "model_type": "bert",
        "architectures": ["BertModel"],
        "max_position_embeddings": config.max_positions - config.position_offset,
        "type_vocab_size": config.num_token_types,
        "pad_token_id": pad_id,
    }


def sizes_json(config: BertConfig) -> dict[str, Any]:
    """The inverse of `sizes_of`."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.weights_dropout_rate,
        "layer_norm_eps": config.norm_epsilon,
        "dtype": "float32",
    }


def origins_of(config: BertConfig, pad_id: int) -> dict[str, Origin]:
    return tables_of(pad_id, first_position=config.position_offset) | layers_of(config)


def tables_of(pad_id: int, *, first_position: int = 0, has_types: bool = True) -> dict[str, Origin]:
    """The origins of an embedder; the position table's rows before `first_position` are not theirs."""
    types = {"embedder/token_type/embedding": Origin("embeddings.token_type_embeddings.weight")} if has_types else {}
    return {
        "embedder/embedding": Origin("embeddings.word_embeddings.weight", swapped_row=pad_id),
        "embedder/position/embedding": Origin("embeddings.position_embeddings.weight", first_row=first_position),
        **types,
        **kind.norm("embedder/norm", "embeddings.LayerNorm"),
    }


def layers_of(config: BertConfig) -> dict[str, Origin]:
    """The origins of an encoder."""
    origins: dict[str, Origin] = {}
    for index in range(config.num_layers):
        ours, theirs = f"encoder/layers_{index}", f"encoder.layer.{index}"
        for name in ("query", "key", "value"):
            origins |= kind.linear(f"{ours}/attention/{name}", f"{theirs}.attention.self.{name}")
        origins |= kind.linear(f"{ours}/attention/out", f"{theirs}.attention.output.dense")
        origins |= kind.norm(f"{ours}/attention_layer_norm", f"{theirs}.attention.output.LayerNorm")
        origins |= feed_forward_of(ours, theirs)
    return origins


def feed_forward_of(ours: str, theirs: str) -> dict[str, Origin]:
    """The origins of a layer's second half."""
    return {
        **kind.linear(f"{ours}/mlp/wi", f"{theirs}.intermediate.dense"),
        **kind.linear(f"{ours}/mlp/wo", f"{theirs}.output.dense"),
        **kind.norm(f"{ours}/mlp_layer_norm", f"{theirs}.output.LayerNorm"),
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
    keys=KEYS,
    config_of=config_of,
    origins_of=origins_of,
    json_of=json_of,
    holds=lambda config, pad_id: is_plain(config) and config.position_offset != pad_id + 1,
    own_name=own_name,
    heads=HEADS,
    kept=r"pooler\.dense\.(weight|bias)",
)
