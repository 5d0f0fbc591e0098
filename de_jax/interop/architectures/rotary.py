"""The common settings of rotary encoders: layer types, bases of positions, and Llama's names of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from de_jax.interop.architectures import kind
from de_jax.interop.architectures.kind import Keys, Kind, Settings
from de_jax.interop.pretrained import Origin
from de_jax.models import positions
from de_jax.models.rotary import RotaryConfig, global_pattern
from de_jax.types import InputError

GLOBAL, LOCAL = "full_attention", "sliding_attention"


def global_layers(settings: Settings, num_layers: int, default: tuple[int, int]) -> tuple[int, int]:
    """(`global_every`, `first_global`) of the layer types that a config.json lists, or `default` where it lists none."""
    listed = settings.values.get("layer_types")
    if listed is None:
        return default
    are_global = (
        [name == GLOBAL for name in listed] if isinstance(listed, list) and all(name in (GLOBAL, LOCAL) for name in listed) else []
    )
    pattern = global_pattern(are_global, default) if len(are_global) == num_layers else None
    if pattern is not None:
        return pattern
    raise InputError(
        f"{settings.file}: layer_types is not a list of {num_layers} times {GLOBAL!r} or {LOCAL!r} whose global layers are equally "
        "far apart; the towers here have no other."
    )


def layer_types(config: RotaryConfig) -> list[str]:
    """The inverse of `global_layers`."""
    return [GLOBAL if config.is_global(layer) else LOCAL for layer in range(config.num_layers)]


def require_global(settings: Settings) -> None:
    """Refuses local layers."""
    settings.require("layer_types", global_layers(settings, settings.size("num_hidden_layers"), (1, 0)), (1, 0))


def parameters(settings: Settings, layer_type: str | None) -> Mapping[str, Any]:
    """The settings of rotary positions for a type of layers, or for all layers.

    They are in `rope_parameters`, or in the `rope_scaling` of transformers 4, which is for global layers only. If both are set,
    versions differ in the choice between them, so this is refused.
    """
    older, newer = (settings.values.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    for name, found in (("rope_scaling", older), ("rope_parameters", newer)):
        if not isinstance(found, dict):
            raise InputError(f"{settings.file}: {name} is {found!r}; it must be an object.")
    if older and newer:
        raise InputError(f"{settings.file}: rope_scaling and rope_parameters are both set; remove the wrong one.")
    if older:
        return {} if layer_type == LOCAL else older
    if layer_type is None:
        return newer
    if others := sorted(set(newer) - {GLOBAL, LOCAL}):
        settings.require("rope_parameters", others[0], GLOBAL, LOCAL)
    own = newer.get(layer_type) or {}
    if not isinstance(own, dict):
        raise InputError(f"{settings.file}: rope_parameters/{layer_type} is {own!r}; it must be an object.")
    return own


SCALINGS = {
    "default": (),
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("beta_slow", "beta_fast", "original_max_position_embeddings", "attention_factor"),
}
"""The settings of each way to scale positions, beside a factor; few turns before many."""
TURNS: Mapping[str, tuple[float | None, float | None]] = {"llama3": (None, None), "yarn": (1.0, 32.0)}
"""Where config.json does not say; None must be said."""


def rope(settings: Settings, layer_type: str | None, older_name: str, default: float, *scalings: str) -> dict[str, Any]:
    """The base and scaling of positions in a type of layers, or in all, as fields of `RotaryConfig` for global layers.

    Args:
        settings: the config.json.
        layer_type: None for all.
        older_name: of the base in transformers 4.
        default: base.
        scalings: those allowed, out of `SCALINGS`.
    """
    found = parameters(settings, layer_type)
    scaling = found.get("rope_type", found.get("type", "default"))
    settings.require("rope_type", scaling, "default", *scalings)
    if unknown := sorted(set(found) - {"rope_type", "type", "rope_theta", "factor", *SCALINGS[scaling]}):
        raise InputError(f"{settings.file}: the setting {unknown[0]} of rope_parameters is unknown here.")
    read = settings._replace(values={**settings.values, **found})
    if layer_type is not None and "rope_type" not in found and found.get("type", "default") != "default":
        raise InputError(f"{settings.file}: transformers 4 and 5 read the type in rope_scaling differently; name it rope_type.")
    name = "rope_theta" if "rope_theta" in found else older_name
    fields: dict[str, Any] = {"rope_base": read.positive(name, default)}
    if fields["rope_base"] < 1:
        raise InputError(f"{settings.file}: {name} is {fields['rope_base']!r}; it must be at least 1.")
    if scaling == "default":
        return fields
    fields |= {"rope_scaling": scaling, "rope_factor": read.positive("factor")}
    if scaling == "linear":
        return fields
    if scaling == "yarn" and fields["rope_base"] <= 1:
        raise InputError(f"{settings.file}: rope_theta is {fields['rope_base']!r}; beside yarn it must be greater than 1.")
    few, many, length = SCALINGS[scaling][:3]
    size = positions.size(scaling, fields["rope_factor"])
    if abs(read.positive("attention_factor", size) - size) > 1e-6:
        read.require("attention_factor", found["attention_factor"], size)
    return fields | {
        "rope_length": read.size(length, settings.values.get("max_position_embeddings")),
        "rope_few_turns": read.positive(few, TURNS[scaling][0]),
        "rope_many_turns": read.positive(many, TURNS[scaling][1]),
    }


def scaling_json(config: RotaryConfig) -> dict[str, Any]:
    """The inverse of `rope`, except for the base."""
    if config.rope_factor == 1:
        return {"rope_type": "default"}
    values = (config.rope_few_turns, config.rope_many_turns, config.rope_length)
    told = dict(zip(SCALINGS[config.rope_scaling], values, strict=False))
    return {"rope_type": config.rope_scaling, "factor": config.rope_factor, **told}


def held_by(
    config_of: Callable[[Settings], RotaryConfig], json_of: Callable[[RotaryConfig, int], dict[str, Any]]
) -> Callable[[Any, int], bool]:
    """Whether a kind's config.json tells all of an encoder but its precision and how it is compiled."""

    def holds(config: Any, pad_id: int) -> bool:
        if not isinstance(config, RotaryConfig):
            return False
        try:
            told = config_of(Settings(Path("config.json"), json_of(config, pad_id)))
        except InputError:
            return False
        return told == _comparable(config, told)

    return holds


def _comparable(config: RotaryConfig, told: RotaryConfig) -> RotaryConfig:
    """`config`, without what changes nothing."""
    same: dict[str, Any] = {name: getattr(told, name) for name in ("dtype", "remat", "scan_layers", "attention")}
    if config.kv_heads == told.kv_heads:
        same["num_kv_heads"] = told.num_kv_heads
    if config.weights_dropout_rate == told.weights_dropout_rate:
        same["attention_dropout_rate"] = told.attention_dropout_rate
    if layer_types(config) == layer_types(told):
        same |= {"global_every": told.global_every, "first_global": told.first_global}
        unused = [*(("rope_base", "rope_factor") if GLOBAL not in layer_types(config) else ())]
        unused += [*(("window", "window_after", "local_rope_base") if LOCAL not in layer_types(config) else ())]
        same |= {name: getattr(told, name) for name in unused}
    if config.windows == told.windows:
        same["window_after"] = told.window_after
    if config.rope_factor == told.rope_factor == 1:
        same |= {name: getattr(told, name) for name in ("rope_scaling", "rope_length", "rope_few_turns", "rope_many_turns")}
    elif config.rope_scaling == told.rope_scaling == "linear":
        same |= {name: getattr(told, name) for name in ("rope_length", "rope_few_turns", "rope_many_turns")}
    if config.has_out_bias == told.has_out_bias:
        same["out_bias"] = told.out_bias
    if config.has_mlp_out_bias == told.has_mlp_out_bias:
        same["mlp_out_bias"] = told.mlp_out_bias
    if (config.query_scale or config.head_dim**-0.5) == (told.query_scale or told.head_dim**-0.5):
        same["query_scale"] = told.query_scale
    return dataclasses.replace(config, **same)


def llama_origins(
    config: RotaryConfig, pad_id: int, *, norms: Mapping[str, str], added: float = 0.0, prefix: str = ""
) -> dict[str, Origin]:
    """The origins of an encoder with Llama's names.

    Args:
        config: the encoder.
        pad_id: the vocabulary's own padding.
        norms: their names of a layer's norms, by ours.
        added: what their norms keep less than ours.
        prefix: of all their names.
    """
    scale = lambda name: Origin(f"{name}.weight", added=added)  # noqa: E731
    origins = {
        "embedder/embedding": Origin(f"{prefix}embed_tokens.weight", swapped_row=pad_id),
        "encoder/encoder_norm/scale": scale(f"{prefix}norm"),
    }
    for index in range(config.num_layers):
        ours, theirs = f"encoder/layers_{index}", f"{prefix}layers.{index}"
        origins |= {f"{ours}/{name}/scale": scale(f"{theirs}.{their_name}") for name, their_name in norms.items()}
        attention, bias = f"{theirs}.self_attn", config.attention_bias
        for name in ("query", "key", "value"):
            origins |= kind.linear(f"{ours}/attention/{name}", f"{attention}.{name[0]}_proj", bias=bias)
        origins |= kind.linear(f"{ours}/attention/out", f"{attention}.o_proj", bias=config.has_out_bias)
        if config.qk_norm:
            origins |= {f"{ours}/attention/{of}_norm/scale": scale(f"{attention}.{of[0]}_norm") for of in ("query", "key")}
        for name, their_name in (("wi_0", "gate"), ("wi_1", "up")):
            origins |= kind.linear(f"{ours}/mlp/{name}", f"{theirs}.mlp.{their_name}_proj", bias=config.mlp_bias)
        origins |= kind.linear(f"{ours}/mlp/wo", f"{theirs}.mlp.down_proj", bias=config.has_mlp_out_bias)
    return origins


def encoder_kind(
    model_type: str,
    keys: Keys,
    config_of: Callable[[Settings], RotaryConfig],
    json_of: Callable[[RotaryConfig, int], dict[str, Any]],
    origins_of: Callable[[RotaryConfig, int], dict[str, Origin]],
    *,
    heads: tuple[str, ...],
    prefix: str = "model|transformer",
    is_renamed: bool = False,
) -> Kind:
    """A kind of rotary encoder; `prefix`, a regular expression, is what models with a head put before the encoder's names."""
    return Kind(
        model_types=(model_type,),
        keys=keys,
        config_of=config_of,
        origins_of=origins_of,
        json_of=json_of,
        holds=held_by(config_of, json_of),
        own_name=kind.without(prefix),
        heads=heads,
        is_shift_free=True,
        is_renamed=is_renamed,
    )
