"""ModernBERT: local layers between global ones, fused kernels; the embeddings' norm is the first layer's."""

from __future__ import annotations

from typing import Any

from de_jax.interop.architectures import kind, rotary
from de_jax.interop.architectures.kind import Keys, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models.rotary import RotaryConfig
from de_jax.types import InputError

GLOBAL_EVERY = 3
GLOBAL_BASE, LOCAL_BASE = 160_000.0, 10_000.0
ACTIVATIONS = {"gelu": "gelu", "silu": "silu"}
KEYS = Keys(
    read=kind.READ
    + """hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings norm_eps norm_bias
hidden_activation attention_bias mlp_bias attention_dropout embedding_dropout mlp_dropout local_attention layer_types
global_attn_every_n_layers (global|local)_rope_theta rope_parameters""",
    harmless=kind.HARMLESS
    + """ layer_norm_eps initializer_cutoff_factor decoder_bias classifier_(pooling|bias|activation) deterministic_flash_attn
reference_compile repad_logits_with_grad sparse_pred(iction|_ignore_index)""",
    fixed={**kind.FIXED, "position_embedding_type": ("absolute",), "rope_scaling": (None,)},
    refused=kind.REFUSED,
)


def config_of(settings: Settings) -> RotaryConfig:
    values = settings.values
    activation = values.get("hidden_activation", "gelu")
    settings.require("hidden_activation", activation, *ACTIVATIONS)
    model_dim, num_heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    if model_dim % num_heads:
        raise InputError(f"{settings.file}: num_attention_heads is {num_heads}, which does not divide hidden_size = {model_dim}.")
    dropped, of_weights = settings.share("mlp_dropout", 0.0), settings.share("attention_dropout", 0.0)
    settings.require("embedding_dropout", settings.share("embedding_dropout", 0.0), dropped)
    num_layers = settings.size("num_hidden_layers")
    every, first = rotary.global_layers(settings, num_layers, (settings.size("global_attn_every_n_layers", GLOBAL_EVERY), 0))
    return RotaryConfig(
        vocab_size=settings.size("vocab_size"),
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=model_dim // num_heads,
        mlp_dim=settings.size("intermediate_size"),
        max_positions=settings.size("max_position_embeddings", 8192),
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        norm_bias=settings.flag("norm_bias", False),
        norm_epsilon=settings.epsilon("norm_eps", 1e-5),
        attention_bias=settings.flag("attention_bias", False),
        mlp_bias=settings.flag("mlp_bias", False),
        global_every=every,
        first_global=first,
        window=settings.size("local_attention", 128, at_least=2) // 2,
        **rotary.rope(settings, rotary.GLOBAL, "global_rope_theta", GLOBAL_BASE),
        local_rope_base=rotary.rope(settings, rotary.LOCAL, "local_rope_theta", LOCAL_BASE)["rope_base"],
        dropout_rate=dropped,
        attention_dropout_rate=None if of_weights == dropped else of_weights,
        dtype="float32",
    )


def json_of(config: RotaryConfig, pad_id: int) -> dict[str, Any]:
    return {
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_positions,
        "hidden_activation": config.activation,
        "norm_bias": config.norm_bias,
        "norm_eps": config.norm_epsilon,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "layer_types": rotary.layer_types(config),
        **({} if config.first_global else {"global_attn_every_n_layers": config.global_every}),  # for transformers 4
        "local_attention": 2 * config.window,
        "global_rope_theta": config.rope_base,
        "local_rope_theta": config.local_rope_base,
        "embedding_dropout": config.dropout_rate,
        "mlp_dropout": config.dropout_rate,
        "attention_dropout": config.weights_dropout_rate,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


def origins_of(config: RotaryConfig, pad_id: int) -> dict[str, Origin]:
    origins = {
        "embedder/embedding": Origin("embeddings.tok_embeddings.weight", swapped_row=pad_id),
        **kind.norm("encoder/encoder_norm", "final_norm", bias=config.norm_bias),
    }
    for index in range(config.num_layers):
        ours, theirs = f"encoder/layers_{index}", f"layers.{index}"
        first_norm = f"{theirs}.attn_norm" if index else "embeddings.norm"
        origins |= kind.norm(f"{ours}/pre_attention_layer_norm", first_norm, bias=config.norm_bias)
        for which, name in enumerate(("query", "key", "value")):
            origins |= kind.linear(f"{ours}/attention/{name}", f"{theirs}.attn.Wqkv", bias=config.attention_bias, part=(which, 3))
        origins |= kind.linear(f"{ours}/attention/out", f"{theirs}.attn.Wo", bias=config.attention_bias)
        origins |= kind.norm(f"{ours}/pre_mlp_layer_norm", f"{theirs}.mlp_norm", bias=config.norm_bias)
        for which, name in enumerate(("wi_0", "wi_1")):
            origins |= kind.linear(f"{ours}/mlp/{name}", f"{theirs}.mlp.Wi", bias=config.mlp_bias, part=(which, 2))
        origins |= kind.linear(f"{ours}/mlp/wo", f"{theirs}.mlp.Wo", bias=config.mlp_bias)
    return origins


KIND = rotary.encoder_kind("modernbert", KEYS, config_of, json_of, origins_of, heads=(r"(head|decoder|classifier)\..*",))
