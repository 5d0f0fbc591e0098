"""Llama, and the settings common to its family: causal, grouped heads, norms before each half, gated by silu."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import kind, rotary
from de_jax.interop.architectures.kind import Keys, Setting, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig

NORMS = {"pre_attention_layer_norm": "input_layernorm", "pre_mlp_layer_norm": "post_attention_layernorm"}
BASE = 10_000.0
SCALINGS = ("linear", "llama3", "yarn")
HEADS = (r"(lm_head|score|classifier|dense|qa_outputs)\..*",)
TABLE = {
    "vocab_size": Setting("vocab_size"),
    "model_dim": Setting("hidden_size"),
    "num_layers": Setting("num_hidden_layers"),
    "num_heads": Setting("num_attention_heads"),
    "num_kv_heads": Setting("num_key_value_heads", attribute="kv_heads"),
    "head_dim": Setting("head_dim"),
    "mlp_dim": Setting("intermediate_size"),
    "max_positions": Setting("max_position_embeddings", 32768),
    "norm_epsilon": Setting("rms_norm_eps", 1e-6, "epsilon"),
    "attention_dropout_rate": Setting("attention_dropout", 0.0, "share", "weights_dropout_rate"),
}
BIASES = {name: Setting(name, False, "flag") for name in ("attention_bias", "mlp_bias")}


def keys(read: str, harmless: str = "", **more: Any) -> Keys:
    """The known settings of such a kind's config.json, together with those given."""
    rope = "rope_(theta|scaling|parameters)"
    return kind.keys(TABLE, f"{rope} {read}", f"pretraining_tp {harmless}", **{"hidden_act": ("silu",), **more})


def fields(settings: Settings, table: dict[str, Setting] = TABLE, **defaults: Any) -> dict[str, Any]:
    """The common settings of such a config.json, as fields of `RotaryConfig`.

    `is_causal` is false where a decoder was made an encoder, as for GTE-Qwen2; transformers 5 reads it so too.

    `defaults` are of settings that the kind has and that file does not; heads of keys and values are as many as others.
    """
    settings = settings._replace(values={**defaults, **settings.values})
    model_dim, num_heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    if settings.values.get("head_dim") is None:
        settings.require("hidden_size", model_dim, model_dim // num_heads * num_heads)
    own = {"head_dim": model_dim // num_heads, "num_key_value_heads": num_heads}
    told = {name: value for name, value in settings.values.items() if value is not None or name not in own}
    return {
        **settings._replace(values={**own, **told}).fields(table),
        "activation": "silu",
        "norm": "rms",
        "norm_embeddings": False,
        "causal": settings.flag("is_causal", True),
        "global_every": 1,
        **rotary.rope(settings, None, "rope_theta", BASE, *SCALINGS),
    }


def json_as(config: RotaryConfig, pad_id: int, model_type: str, model: str, **own: Any) -> dict[str, Any]:
    """The config.json of an encoder of `fields`, with the names of the kind and of transformers' class."""
    common = {
        "hidden_act": "silu",
        "rope_theta": config.rope_base,
        **({"rope_scaling": rotary.scaling_json(config)} if config.rope_factor != 1 else {}),
        **({} if config.causal else {"is_causal": False}),
        "use_cache": False,
        "tie_word_embeddings": True,
    }
    return kind.written(config, pad_id, TABLE, model_type, model, **common | own)


def biases_json(config: RotaryConfig) -> dict[str, bool]:
    """The settings in `BIASES`."""
    return {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    return rotary.llama_origins(config, pad_id, norms=NORMS)


def config_of(settings: Settings) -> RotaryConfig:
    return RotaryConfig(**fields(settings, TABLE | BIASES))


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    return json_as(config, pad_id, "llama", "LlamaModel", **biases_json(config))


KIND = rotary.encoder_kind("llama", keys("is_causal attention_bias mlp_bias"), config_of, json_of, origins_of, heads=HEADS)
