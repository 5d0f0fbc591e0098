"""Nomic's BERT and GTE's (Zhang et al. 2024): rotary positions, gated layers and BERT's norms; as transformers 5 has them.

Nomic's layers have no biases; GTE's have fused kernels.
"""

import functools
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
GTE_TABLE = TABLE | {
    "max_positions": Setting("max_position_embeddings", 8192),
    "num_token_types": Setting("type_vocab_size", 1, options={"at_least": 0}),
    "dropout_rate": Setting("hidden_dropout_prob", 0.1, "share"),
}
KEYS = kind.keys(TABLE, "head_dim hidden_act rope_(theta|scaling|parameters)", "position_embedding_type")
MAPS: Maps = {
    **parts("attn.Wqkv", "attention/query", "attention/key", "attention/value"),
    "attention/out": "attn.out_proj",
    "mlp/wi_0": "mlp.fc12",
    "mlp/wi_1": "mlp.fc11",
    "mlp/wo": "mlp.fc2",
}
NORMS = {"attention_layer_norm": "norm1", "mlp_layer_norm": "norm2"}
GTE_MAPS: Maps = {
    **parts("attention.qkv_proj", "attention/query", "attention/key", "attention/value"),
    "attention/out": "attention.o_proj",
    **parts("mlp.up_gate_proj", "mlp/wi_1", "mlp/wi_0"),
    "mlp/wo": "mlp.down_proj",
}
GTE_NORMS = {"attention_layer_norm": "attn_ln", "mlp_layer_norm": "mlp_ln"}


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


def origins_of(config: RotaryConfig, pad_id: int, *, norm: str, place: str, maps: Maps, norms: dict[str, str]) -> dict[str, Origin]:
    """The origins of an encoder; they name the norm of its embedder, and the place of its layers, so."""
    origins = {"embedder/embedding": Origin("embeddings.word_embeddings.weight", swapped_row=pad_id)}
    if config.num_token_types:
        origins["embedder/token_type/embedding"] = Origin("embeddings.token_type_embeddings.weight")
    return origins | kind.norm("embedder/norm", norm) | rotary.layers(config, place, maps, norms)


def nomic_of(settings: Settings) -> RotaryConfig:
    if OLD_NAME in settings.values:
        raise InputError(
            f"{settings.file}: the setting {OLD_NAME} is of the model's own code, which is never run; the settings that are read "
            "are those of NomicBertConfig in transformers 5."
        )
    return RotaryConfig(**fields(settings, TABLE, 1000.0, "silu", "gelu"))


def gte_of(settings: Settings) -> RotaryConfig:
    return RotaryConfig(**fields(settings, GTE_TABLE, 160_000.0, "gelu", "silu"), attention_bias=True, mlp_out_bias=True)


NOMIC = rotary.encoder_kind(
    "nomic_bert",
    KEYS,
    nomic_of,
    functools.partial(json_as, model_type="nomic_bert", model="NomicBertModel"),
    functools.partial(origins_of, norm="emb_ln", place="encoder.layers", maps=MAPS, norms=NORMS),
    heads=(r"(cls|pooler|classifier)\..*",),
    prefix="nomic_bert|bert",
    is_renamed=True,
)
GTE = rotary.encoder_kind(
    "gte",
    KEYS,
    gte_of,
    functools.partial(json_as, model_type="gte", model="GteModel"),
    functools.partial(origins_of, norm="embeddings.LayerNorm", place="encoder.layer", maps=GTE_MAPS, norms=GTE_NORMS),
    heads=(r"(lm_head|pooler|classifier)\..*",),
    prefix="gte|new",  # the files of the model's own code have "new." there
    is_renamed=True,
)
KINDS = (NOMIC, GTE)
