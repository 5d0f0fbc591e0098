"""DistilBERT: BERT without token types, under names of its own.

In training it drops nothing of what attention gives, where the towers here do as BERT does; embeddings are the same.
"""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import bert, kind
from de_jax.interop.architectures.kind import Kind, Setting, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.bert import BertConfig

NORM_EPSILON = 1e-12
TABLE = {
    "vocab_size": Setting("vocab_size"),
    "model_dim": Setting("dim"),
    "num_layers": Setting("n_layers", options={"at_least": 0}),
    "num_heads": Setting("n_heads"),
    "mlp_dim": Setting("hidden_dim"),
    "max_positions": Setting("max_position_embeddings"),
    "dropout_rate": Setting("dropout", 0.1, "share"),
    "attention_dropout_rate": Setting("attention_dropout", 0.1, "share", "weights_dropout_rate"),
}
MAPS = {
    **{f"attention/{name}": f"attention.{name[0]}_lin" for name in ("query", "key", "value")},
    "attention/out": "attention.out_lin",
    "mlp/wi": "ffn.lin1",
    "mlp/wo": "ffn.lin2",
}
NORMS = {"attention_layer_norm": "sa_layer_norm", "mlp_layer_norm": "output_layer_norm"}


def config_of(settings: Settings) -> BertConfig:
    return BertConfig(**settings.fields(TABLE), num_token_types=0, norm_epsilon=NORM_EPSILON)


def json_of(config: BertConfig, pad_id: int) -> dict[str, Any]:
    length = config.max_positions - config.position_offset
    own = {"activation": "gelu", "max_position_embeddings": length}
    return kind.written(config, pad_id, TABLE, "distilbert", "DistilBertModel", **own)


def origins_of(config: BertConfig, pad_id: int) -> dict[str, Origin]:
    tables = bert.tables_of(pad_id, first_position=config.position_offset, has_types=False)
    return tables | kind.layers(config.num_layers, "transformer.layer", MAPS, NORMS)


def holds(config: Any, pad_id: int) -> bool:
    is_plain = isinstance(config, BertConfig) and not config.num_token_types and not config.num_buckets
    return is_plain and config.norm_epsilon == NORM_EPSILON


KIND = Kind(
    model_types=("distilbert",),
    keys=kind.keys(TABLE, harmless="sinusoidal_pos_embds tie_weights_ qa_dropout seq_classif_dropout", activation=("gelu",)),
    config_of=config_of,
    origins_of=origins_of,
    json_of=json_of,
    holds=holds,
    own_name=kind.without("distilbert"),
    heads=(r"(pre_classifier|classifier|qa_outputs|vocab_(transform|layer_norm|projector))\..*", r"embeddings\.position_ids"),
)
