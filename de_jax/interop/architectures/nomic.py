"""Nomic's BERT: rotary positions, gated layers without biases, and BERT's norms; as transformers 5 has it."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import kind, rotary
from de_jax.interop.architectures.kind import Keys, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig
from de_jax.types import InputError

BASE = 1000.0
MAX_POSITIONS = 2048
OLD_NAME = "n_embd"
KEYS = Keys(
    read=kind.READ
    + """hidden_size num_hidden_layers num_attention_heads head_dim intermediate_size max_position_embeddings layer_norm_eps
type_vocab_size hidden_act (hidden|attention_probs)_dropout_prob rope_(theta|scaling|parameters)""",
    harmless=kind.HARMLESS + " position_embedding_type",
    fixed=kind.FIXED,
    refused=kind.REFUSED,
)


def fields(settings: Settings, base: float, types: int) -> dict[str, Any]:
    """The common settings of Nomic's and GTE's BERT, as fields of `RotaryConfig`.

    Args:
        settings: the config.json.
        base: of positions, where it does not say.
        types: of tokens, where it does not say.
    """
    model_dim, num_heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    told = settings.values.get("head_dim")
    settings.require("hidden_size", model_dim, model_dim // num_heads * num_heads)
    settings.require("head_dim", told, None, model_dim // num_heads)
    dropped, of_weights = settings.share("hidden_dropout_prob"), settings.share("attention_probs_dropout_prob", 0.0)
    return {
        "vocab_size": settings.size("vocab_size"),
        "model_dim": model_dim,
        "num_layers": settings.size("num_hidden_layers"),
        "num_heads": num_heads,
        "head_dim": model_dim // num_heads,
        "mlp_dim": settings.size("intermediate_size"),
        "num_token_types": settings.size("type_vocab_size", types) if settings.values.get("type_vocab_size", types) else 0,
        "norm_bias": True,
        "norm_epsilon": settings.epsilon("layer_norm_eps", 1e-12),
        "norm_embeddings": False,
        "norm_sums": True,
        "global_every": 1,
        **rotary.rope(settings, None, "rope_theta", base, "linear", "yarn"),
        "dropout_rate": dropped,
        "attention_dropout_rate": None if of_weights == dropped else of_weights,
        "dtype": "float32",
    }


def values(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    """The inverse of `fields`."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.num_token_types,
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_epsilon,
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.weights_dropout_rate,
        "rope_parameters": {"rope_theta": config.rope_base, **rotary.scaling_json(config)},
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


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
    activation = settings.values.get("hidden_act", "silu")
    settings.require("hidden_act", activation, "silu", "gelu")
    max_positions = settings.size("max_position_embeddings", MAX_POSITIONS)
    dropout = {"hidden_dropout_prob": 0.0, **settings.values}
    return RotaryConfig(**fields(settings._replace(values=dropout), BASE, 2), max_positions=max_positions, activation=activation)


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    return {"model_type": "nomic_bert", "architectures": ["NomicBertModel"], **values(config, pad_id)}


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    origins = embedder_origins(config, pad_id, "emb_ln")
    for index in range(config.num_layers):
        ours, theirs = f"encoder/layers_{index}", f"encoder.layers.{index}"
        for which, name in enumerate(("query", "key", "value")):
            origins |= kind.linear(f"{ours}/attention/{name}", f"{theirs}.attn.Wqkv", bias=False, part=(which, 3))
        origins |= kind.linear(f"{ours}/attention/out", f"{theirs}.attn.out_proj", bias=False)
        origins |= kind.norm(f"{ours}/attention_layer_norm", f"{theirs}.norm1")
        for name, their_name in (("wi_0", "fc12"), ("wi_1", "fc11"), ("wo", "fc2")):
            origins |= kind.linear(f"{ours}/mlp/{name}", f"{theirs}.mlp.{their_name}", bias=False)
        origins |= kind.norm(f"{ours}/mlp_layer_norm", f"{theirs}.norm2")
    return origins


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
