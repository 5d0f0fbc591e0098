"""Gemma 3's text model and EmbeddingGemma: norms before and after each half, local layers with positions of their own."""

from typing import Any

from de_jax.interop.architectures import kind, rotary
from de_jax.interop.architectures.kind import Setting, Settings
from de_jax.models.rotary import RotaryConfig

NORMS = {
    "pre_attention_layer_norm": "input_layernorm",
    "post_attention_layer_norm": "post_attention_layernorm",
    "pre_mlp_layer_norm": "pre_feedforward_layernorm",
    "post_mlp_layer_norm": "post_feedforward_layernorm",
}
GLOBAL_EVERY = 6
GLOBAL_BASE, LOCAL_BASE = 1_000_000.0, 10_000.0
TABLE = kind.SIZES | {
    "num_heads": Setting("num_attention_heads", 8),
    "num_kv_heads": Setting("num_key_value_heads", 4, attribute="kv_heads"),
    "head_dim": Setting("head_dim", 256),
    "max_positions": Setting("max_position_embeddings", 131_072),
    "norm_epsilon": Setting("rms_norm_eps", 1e-6, "epsilon"),
    "attention_bias": Setting("attention_bias", False, "flag"),
    "attention_dropout_rate": Setting("attention_dropout", 0.0, "share", "weights_dropout_rate"),
}
READ = """query_pre_attn_scalar sliding_window sliding_window_pattern layer_types rope_(theta|local_base_freq|scaling|parameters)"""
FIXED: dict[str, Any] = {"hidden_activation": ("gelu_pytorch_tanh",)}
KEYS = kind.keys(
    TABLE,
    READ + " use_bidirectional_attention",
    "final_logit_softcapping _sliding_window_pattern",  # written beside layer_types, never read
    **FIXED,
    attn_logit_softcapping=(None,),
)


def fields(settings: Settings, table: dict[str, Setting] = TABLE) -> dict[str, Any]:
    """The settings common to the Gemma family's files, as fields of `RotaryConfig`."""
    found, scalar = settings.fields(table), settings.positive("query_pre_attn_scalar", 256.0)
    return {
        **found,
        "activation": "gelu_tanh",
        "norm": "rms",
        "norm_embeddings": False,
        "post_norms": True,
        "scale_embeddings": True,
        "query_scale": None if scalar == found["head_dim"] else scalar**-0.5,
    }


def json_as(config: RotaryConfig, pad_id: int, model_type: str, model: str | None = None, **own: Any) -> dict[str, Any]:
    """The config.json of an encoder of `fields`, and the types of its layers."""
    common = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(config.query_scale**-2) if config.query_scale else config.head_dim,
        "layer_types": rotary.layer_types(config),
        "use_cache": False,
    }
    return kind.written(config, pad_id, TABLE, model_type, model, **common | own)


def third_fields(settings: Settings) -> dict[str, Any]:
    """`fields`, and those of the family's third generation."""
    pattern = settings.size("sliding_window_pattern", GLOBAL_EVERY)
    every, first = rotary.global_layers(settings, settings.size("num_hidden_layers"), (pattern, pattern - 1))
    return {
        **fields(settings),
        "qk_norm": True,
        "global_every": every,
        "first_global": first,
        **rotary.rope(settings, rotary.GLOBAL, "rope_theta", GLOBAL_BASE, "linear"),
        "local_rope_base": rotary.rope(settings, rotary.LOCAL, "rope_local_base_freq", LOCAL_BASE)["rope_base"],
    }


def third_rope(config: RotaryConfig) -> dict[str, Any]:
    """The positions of `third_fields`, as config.json has them."""
    return {
        rotary.GLOBAL: {"rope_theta": config.rope_base, **rotary.scaling_json(config)},
        rotary.LOCAL: {"rope_theta": config.local_rope_base, "rope_type": "default"},
    }


def config_of(settings: Settings) -> RotaryConfig:
    causal = not settings.flag("use_bidirectional_attention", False)
    window = settings.size("sliding_window", 4096, at_least=2)
    return RotaryConfig(**third_fields(settings), causal=causal, window=window - 1 if causal else window // 2)


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    own = {
        "rope_parameters": third_rope(config),
        "sliding_window": config.window + 1 if config.causal else 2 * config.window,
        "use_bidirectional_attention": not config.causal,
    }
    return json_as(config, pad_id, "gemma3_text", "Gemma3TextModel", **own)


KINDS = (
    rotary.encoder_kind(
        "gemma3_text",
        KEYS,
        config_of,
        json_of,
        lambda config, pad_id: rotary.llama_origins(config, pad_id, norms=NORMS, added=1.0),
        heads=(r"(lm_head|score|classifier|qa_outputs)\..*",),
    ),
)
