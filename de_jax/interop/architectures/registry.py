"""The kinds of encoders that come from transformers and go back to it; each has a file of its own beside this one."""

from __future__ import annotations

from de_jax.interop.architectures import (
    bert,
    distilbert,
    eurobert,
    gemma3,
    gte,
    llama,
    mistral,
    modernbert,
    mpnet,
    nomic,
    qwen2,
    qwen3,
    roberta,
    t5,
    t5gemma,
    t5gemma2,
)
from de_jax.interop.architectures.kind import Kind
from de_jax.models.tower import EncoderConfig
from de_jax.types import InputError

_BERTS = (bert, roberta, mpnet, distilbert)
_ROTARY = (modernbert, nomic, gte, eurobert, llama, mistral, qwen2, qwen3, gemma3, t5gemma, t5gemma2)
KINDS: tuple[Kind, ...] = tuple(file.KIND for file in (t5, *_BERTS, *_ROTARY))
MODEL_TYPES = tuple(name for kind in KINDS for name in kind.model_types)


def kind_of_type(file: object, model_type: object) -> Kind:
    """The kind that a config.json names.

    Args:
        file: for the message.
        model_type: as it stands there.

    Raises:
        InputError: no kind has that name.
    """
    found = next((kind for kind in KINDS if model_type in kind.model_types), None)
    if found is None:
        raise InputError(f"{file}: model_type {model_type!r} is not supported; supported types are {', '.join(MODEL_TYPES)}.")
    return found


def kind_of(config: EncoderConfig, pad_id: int) -> Kind:
    """The kind that an encoder is saved as.

    Args:
        config: the encoder.
        pad_id: the vocabulary's own padding.

    Raises:
        InputError: transformers has no model of these settings.
    """
    found = next((kind for kind in KINDS if kind.holds(config, pad_id)), None)
    if found is None:
        raise InputError(
            f"transformers has no model ({', '.join(MODEL_TYPES)}) for a {type(config).__name__} with these settings and a "
            f"vocabulary that pads with {pad_id}; export it in the format safetensors."
        )
    return found
