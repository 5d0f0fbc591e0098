"""Opening a model: a run, a folder of another library, or a name on the Hugging Face hub."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from de_jax.interop import any_model
from de_jax.interop.foreign_tokenizers import SpecialTokens
from de_jax.model import Model
from de_jax.settings import PositiveInt, check_value
from de_jax.training.mesh import sharding
from de_jax.types import InputError


def load(
    source: str | Path,
    *,
    step: int | str | None = None,
    devices: int | Sequence[Any] | None = None,
    pooling: str | None = None,
    tokenizer: str | Path | None = None,
    query_prompt: str | None = None,
    doc_prompt: str | None = None,
    special_tokens: SpecialTokens | None = None,
    truncate_dim: int | None = None,
    dtype: str | None = "auto",
) -> Model:
    """A model to encode with.

    Assumptions about a model of another library are warnings.

    Args:
        source: a run's folder; a folder of sentence-transformers, Hugging Face, T5X or `model.save(format="safetensors")`; the
            address gs:// or s3:// of such a folder; or a name of the Hugging Face hub. A name without a slash that is no folder is
            one of sentence-transformers' own models, or one of `any_model.WITHOUT_ORGANIZATION`, such as "bert-base-uncased".
        step: of a run: a step that has a checkpoint, "best" for the best by the dev score; by default the newest.
        devices: how many of this process's devices share the work, or which; by default all.
        pooling: "mean", "cls" or "lasttoken", of an encoder of Hugging Face, which does not say.
        tokenizer: a spiece.model or tokenizer.json, for a model that brings none, as T5X's.
        query_prompt, doc_prompt: before every text, such as "query: "; by default the model's, "" for none.
        special_tokens: of a Hugging Face or sentence-transformers model, "text" (the default) reads "[SEP]" in a text as text, and
            "as_transformers" as the special token.
        truncate_dim: keep the first so many dimensions, for a Matryoshka model; scaled to length 1 again where the model does so.
        dtype: of matrix products, "float32" or "bfloat16". By default texts are encoded in bfloat16 on devices that multiply it
            natively, else in float32, while `model.run` keeps the model's own; None encodes in that too.

    Raises:
        InputError: no such model, no such checkpoint, or an option that does not fit it.
    """
    if not isinstance(source, str | Path) or source == "":
        raise InputError(f"source is {source!r:.60}; give a run, a folder with a model, or a name of the Hugging Face hub.")
    for name, prompt in {"query_prompt": query_prompt, "doc_prompt": doc_prompt}.items():
        if not isinstance(prompt, str | None):
            raise InputError(f'{name} is {prompt!r:.60}; give a str, or "" for none.')
    mesh = sharding.make_mesh(devices=_chosen(devices))
    run = any_model.open_model(
        source,
        step,
        dtype=None if dtype == "auto" else dtype,
        pooling=pooling,
        tokenizer=tokenizer,
        query_prompt=query_prompt,
        doc_prompt=doc_prompt,
        special_tokens=special_tokens,
    )
    for note in run.notes:
        warnings.warn(note, stacklevel=2)
    run = run._replace(params=jax.device_put(run.params, sharding.replicated(mesh)))
    return Model(run, truncate_dim=truncate_dim, dtype=dtype)


def _chosen(devices: int | Iterable[Any] | None) -> list[Any]:
    """The devices that are meant, of this process."""
    there = jax.local_devices()
    if devices is None:
        return there
    chosen = [devices] if isinstance(devices, jax.Device) else devices
    if not isinstance(chosen, Iterable):
        check_value("devices", chosen, PositiveInt)
        if chosen > len(there):
            raise InputError(f"devices is {chosen}, but this process has {len(there)}; give 1 to {len(there)}.")
        return there[:chosen]
    chosen = list(chosen)
    if not chosen or not all(device in there for device in chosen) or len(set(chosen)) < len(chosen):
        raise InputError(f"devices is {devices!r:.200}; give some of jax.local_devices(), each once, or how many.")
    return chosen
