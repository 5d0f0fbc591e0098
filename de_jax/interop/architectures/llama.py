"""Llama, and the settings common to its family: causal, grouped heads, norms before each half, gated by silu."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import kind, rotary
from de_jax.interop.architectures.kind import Keys, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig

NORMS = {"pre_attention_layer_norm": "input_layernorm", "pre_mlp_layer_norm": "post_attention_layernorm"}
BASE = 10_000.0
SCALINGS = ("linear", "llama3", "yarn")
HEADS = (r"(lm_head|score|classifier|dense|qa_outputs)\..*",)


def keys(read: str = "is_causal", harmless: str = "", fixed: dict[str, tuple[Any, ...]] | None = None, **more: Any) -> Keys:
    """The known settings of such a kind's config.json, together with `read`, `harmless` and `fixed`."""
    sizes = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    rest = "max_position_embeddings rms_norm_eps attention_dropout rope_(theta|scaling|parameters) "
    return Keys(
        read=kind.READ + sizes + rest + read,
        harmless=f"{kind.HARMLESS} pretraining_tp {harmless}",
        fixed={**kind.FIXED, "hidden_act": ("silu",), **(fixed or {})},
        **{"refused": kind.REFUSED, **more},
    )


def fields(settings: Settings, *, kv_heads: int | None = None, epsilon: float = 1e-6) -> dict[str, Any]:
    """What every such config.json says, as fields of `RotaryConfig`.

    `is_causal` is false where a decoder was made an encoder, as for GTE-Qwen2; transformers 5 reads it so too.

    Args:
        settings: the config.json.
        kv_heads: where it does not say; None for as many as there are heads.
        epsilon: of norms, where it does not say.
    """
    model_dim, num_heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    if settings.values.get("head_dim") is None:
        settings.require("hidden_size", model_dim, model_dim // num_heads * num_heads)
        settings = settings._replace(values={**settings.values, "head_dim": model_dim // num_heads})
    if settings.values.get("num_key_value_heads", kv_heads) is None:
        settings = settings._replace(values={**settings.values, "num_key_value_heads": num_heads})
    of_weights = settings.share("attention_dropout", 0.0)
    return {
        "vocab_size": settings.size("vocab_size"),
        "model_dim": model_dim,
        "num_layers": settings.size("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": settings.size("num_key_value_heads", kv_heads),
        "head_dim": settings.size("head_dim"),
        "mlp_dim": settings.size("intermediate_size"),
        "max_positions": settings.size("max_position_embeddings", 32768),
        "activation": "silu",
        "norm": "rms",
        "norm_epsilon": settings.epsilon("rms_norm_eps", epsilon),
        "norm_embeddings": False,
        "causal": settings.flag("is_causal", True),
        "global_every": 1,
        **rotary.rope(settings, None, "rope_theta", BASE, *SCALINGS),
        "attention_dropout_rate": of_weights or None,
        "dtype": "float32",
    }


def values(config: RotaryConfig, pad_id: int, model_type: str, model: str) -> dict[str, Any]:
    """The inverse of `fields`, with the names of the kind and of transformers' class."""
    return {
        "model_type": model_type,
        "architectures": [model],
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "attention_dropout": config.weights_dropout_rate,
        "rope_theta": config.rope_base,
        **({"rope_scaling": rotary.scaling_json(config)} if config.rope_factor != 1 else {}),
        **({} if config.causal else {"is_causal": False}),
        "use_cache": False,
        "tie_word_embeddings": True,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


def biases(settings: Settings) -> dict[str, Any]:
    """Those of Llama's and EuroBERT's linear maps, as fields of `RotaryConfig`."""
    return {name: settings.flag(name, False) for name in ("attention_bias", "mlp_bias")}


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    return rotary.llama_origins(config, pad_id, norms=NORMS)


def config_of(settings: Settings) -> RotaryConfig:
    return RotaryConfig(**fields(settings), **biases(settings))


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    return {**values(config, pad_id, "llama", "LlamaModel"), **own}


KEYS = keys("is_causal attention_bias mlp_bias")
KIND = rotary.encoder_kind("llama", KEYS, config_of, json_of, origins_of, heads=HEADS)
