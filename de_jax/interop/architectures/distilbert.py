"""DistilBERT: BERT without token types, under names of its own.

In training it drops nothing of what attention gives, where the towers here do as BERT does; embeddings are the same.
"""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import bert, kind
from de_jax.interop.architectures.kind import Keys, Kind, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.bert import BertConfig

NORM_EPSILON = 1e-12
KEYS = Keys(
    read=kind.READ + "dim n_layers n_heads hidden_dim max_position_embeddings dropout attention_dropout",
    harmless=kind.HARMLESS + " sinusoidal_pos_embds tie_weights_ qa_dropout seq_classif_dropout",
    fixed={**kind.FIXED, "activation": ("gelu",)},
    refused=kind.REFUSED,
)
ATTENTION = {"query": "q_lin", "key": "k_lin", "value": "v_lin", "out": "out_lin"}


def config_of(settings: Settings) -> BertConfig:
    dropped, of_weights = settings.share("dropout"), settings.share("attention_dropout")
    return BertConfig(
        vocab_size=settings.size("vocab_size"),
        model_dim=settings.size("dim"),
        num_layers=settings.size("n_layers", at_least=0),
        num_heads=settings.size("n_heads"),
        mlp_dim=settings.size("hidden_dim"),
        max_positions=settings.size("max_position_embeddings"),
        num_token_types=0,
        norm_epsilon=NORM_EPSILON,
        dropout_rate=dropped,
        attention_dropout_rate=None if of_weights == dropped else of_weights,
        dtype="float32",
    )


def json_of(config: BertConfig, pad_id: int) -> dict[str, Any]:
    return {
        "model_type": "distilbert",
        "architectures": ["DistilBertModel"],
        "vocab_size": config.vocab_size,
        "dim": config.model_dim,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "hidden_dim": config.mlp_dim,
        "max_position_embeddings": config.max_positions - config.position_offset,
        "dropout": config.dropout_rate,
        "attention_dropout": config.weights_dropout_rate,
        "activation": "gelu",
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


def origins_of(config: BertConfig, pad_id: int) -> dict[str, Origin]:
    origins = bert.tables_of(pad_id, first_position=config.position_offset, has_types=False)
    for index in range(config.num_layers):
        ours, theirs = f"encoder/layers_{index}", f"transformer.layer.{index}"
        for name, their_name in ATTENTION.items():
            origins |= kind.linear(f"{ours}/attention/{name}", f"{theirs}.attention.{their_name}")
        origins |= kind.norm(f"{ours}/attention_layer_norm", f"{theirs}.sa_layer_norm")
        origins |= kind.linear(f"{ours}/mlp/wi", f"{theirs}.ffn.lin1")
        origins |= kind.linear(f"{ours}/mlp/wo", f"{theirs}.ffn.lin2")
        origins |= kind.norm(f"{ours}/mlp_layer_norm", f"{theirs}.output_layer_norm")
    return origins


def holds(config: Any, pad_id: int) -> bool:
    is_plain = isinstance(config, BertConfig) and not config.num_token_types and not config.num_buckets
    return is_plain and config.norm_epsilon == NORM_EPSILON


KIND = Kind(
    model_types=("distilbert",),
    keys=KEYS,
    config_of=config_of,
    origins_of=origins_of,
    json_of=json_of,
    holds=holds,
    own_name=kind.without("distilbert"),
    heads=(r"(pre_classifier|classifier|qa_outputs|vocab_(transform|layer_norm|projector))\..*", r"embeddings\.position_ids"),
)
