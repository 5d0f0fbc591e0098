"""The kinds of encoders that come from transformers and go back to it; each has a file of its own beside this one."""

from __future__ import annotations

import functools
import importlib

from de_jax.interop.architectures.kind import Kind
from de_jax.models.tower import EncoderConfig
from de_jax.types import InputError

FILES = {
    "t5": ("t5", "mt5", "umt5"),
    "bert": ("bert",),
    "roberta": ("roberta", "xlm-roberta", "camembert"),
    "mpnet": ("mpnet",),
    "distilbert": ("distilbert",),
    "modernbert": ("modernbert",),
    "nomic": ("nomic_bert",),
    "gte": ("gte",),
    "eurobert": ("eurobert",),
    "llama": ("llama",),
    "mistral": ("mistral",),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "gemma3": ("gemma3_text",),
    "t5gemma": ("t5gemma",),
    "t5gemma2": ("t5gemma2",),
}
"""The model types of config.json by the file here that reads them, in the order in which one is chosen for an export."""
MODEL_TYPES = tuple(name for types in FILES.values() for name in types)


@functools.cache
def _kind_in(file: str) -> Kind:
    kind: Kind = importlib.import_module(f"de_jax.interop.architectures.{file}").KIND
    return kind


def kind_of_type(file: object, model_type: object) -> Kind:
    """The kind that a config.json names.

    Args:
        file: for the message.
        model_type: as it stands there.

    Raises:
        InputError: no kind has that name.
    """
    found = next((name for name, types in FILES.items() if model_type in types), None)
    if found is None:
        raise InputError(f"{file}: model_type {model_type!r} is not supported; supported types are {', '.join(MODEL_TYPES)}.")
    return _kind_in(found)


def kind_of(config: EncoderConfig, pad_id: int) -> Kind:
    """The kind that an encoder is saved as.

    Args:
        config: the encoder.
        pad_id: the vocabulary's own padding.

    Raises:
        InputError: transformers has no model of these settings.
    """
    found = next((kind for kind in map(_kind_in, FILES) if kind.holds(config, pad_id)), None)
    if found is None:
        raise InputError(
            f"transformers has no model ({', '.join(MODEL_TYPES)}) for a {type(config).__name__} with these settings and a "
            f"vocabulary that pads with {pad_id}; export it in the format safetensors."
        )
    return found
