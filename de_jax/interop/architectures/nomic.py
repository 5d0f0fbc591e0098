"""Nomic's BERT: rotary positions, gated layers without biases, and BERT's norms; as transformers 5 has it."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import kind, rotary
from de_jax.interop.architectures.kind import Maps, Setting, Settings, parts
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig
from de_jax.types import InputError

OLD_NAME = "n_embd"
TABLE = kind.SIZES | {
    "max_positions": Setting("max_position_embeddings", 2048),
    "num_token_types": Setting("type_vocab_size", 2, options={"at_least": 0}),
    "norm_epsilon": Setting("layer_norm_eps", 1e-12, "epsilon"),
    "dropout_rate": Setting("hidden_dropout_prob", 0.0, "share"),
    "attention_dropout_rate": Setting("attention_probs_dropout_prob", 0.0, "share", "weights_dropout_rate"),
}
"""What GTE's BERT has too, with other defaults."""
KEYS = kind.keys(TABLE, "head_dim hidden_act rope_(theta|scaling|parameters)", "position_embedding_type")
MAPS: Maps = {
    **parts("attn.Wqkv", "attention/query", "attention/key", "attention/value"),
    "attention/out": "attn.out_proj",
    "mlp/wi_0": "mlp.fc12",
    "mlp/wi_1": "mlp.fc11",
    "mlp/wo": "mlp.fc2",
}
NORMS = {"attention_layer_norm": "norm1", "mlp_layer_norm": "norm2"}


def fields(settings: Settings, table: dict[str, Setting], base: float, *activations: str) -> dict[str, Any]:
    """The common settings of Nomic's and GTE's BERT, as fields of `RotaryConfig`; the first of the `activations` is the default."""
    found = settings.fields(table)
    activation, head_dim = settings.values.get("hidden_act", activations[0]), found["model_dim"] // found["num_heads"]
    settings.require("hidden_act", activation, *activations)
    settings.require("hidden_size", found["model_dim"], head_dim * found["num_heads"])
    settings.require("head_dim", settings.values.get("head_dim"), None, head_dim)
    return {
        **found,
        "head_dim": head_dim,
        "activation": activation,
        "norm_bias": True,
        "norm_embeddings": False,
        "norm_sums": True,
        "global_every": 1,
        **rotary.rope(settings, None, "rope_theta", base, "linear", "yarn"),
    }


def json_as(config: RotaryConfig, pad_id: int, model_type: str, model: str) -> dict[str, Any]:
    """The config.json of an encoder of `fields`."""
    rope = {"rope_theta": config.rope_base, **rotary.scaling_json(config)}
    return kind.written(config, pad_id, TABLE, model_type, model, hidden_act=config.activation, rope_parameters=rope)


def embedder_origins(config: RotaryConfig, pad_id: int, norm: str) -> dict[str, Origin]:
    """The origins of the embedder, whose norm they name so."""
    origins = {"embedder/embedding": Origin("embeddings.word_embeddings.weight", swapped_row=pad_id)}
    if config.num_token_types:
        origins["embedder/token_type/embedding"] = Origin("embeddings.token_type_embeddings.weight")
    return origins | kind.norm("embedder/norm", norm)


def config_of(settings: Settings) -> RotaryConfig:
    if OLD_NAME in settings.values:
        raise InputError(
            f"{settings.file}: the setting {OLD_NAME} is of the model's own code, which is never run; the settings that are read "
            "are those of NomicBertConfig in transformers 5."
        )
    return RotaryConfig(**fields(settings, TABLE, 1000.0, "silu", "gelu"))


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    return json_as(config, pad_id, "nomic_bert", "NomicBertModel")


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    return embedder_origins(config, pad_id, "emb_ln") | rotary.layers(config, "encoder.layers", MAPS, NORMS)


KIND = rotary.encoder_kind(
    "nomic_bert",
    KEYS,
    config_of,
    json_of,
    origins_of,
    heads=(r"(cls|pooler|classifier)\..*",),
    prefix="nomic_bert|bert",
    is_renamed=True,
)
