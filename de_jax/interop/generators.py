"""A generator from wherever it is: a run of this library, a T5 of Hugging Face in a folder or on the hub, or a T5X checkpoint."""

from __future__ import annotations

from pathlib import Path

from de_jax.data.text.tokenizing import Tokenizer
from de_jax.doc2query.generator_run import GENERATOR_RUN, GeneratorRun, load_generator
from de_jax.interop import huggingface, huggingface_generator, t5x
from de_jax.interop.any_model import folder_of
from de_jax.interop.huggingface_generator import PretrainedGenerator
from de_jax.interop.pretrained import check_own_tokens
from de_jax.types import InputError

QUERY_LENGTH = 64
"""Tokens; docTTTTTquery's."""


def read(source: str | Path, *, step: int | str | None = None, tokenizer: Tokenizer | None = None) -> GeneratorRun:
    """The generator in a folder, or under a name of the Hugging Face hub such as "castorini/doc2query-t5-base-msmarco".

    Args:
        source: as above.
        step: of a run: a step that has a checkpoint, or "best" for the lowest dev loss; by default the newest.
        tokenizer: where the folder brings none.

    Raises:
        InputError: an unknown format, a missing vocabulary, or the errors of the format's own `read`.
    """
    folder = folder_of(source)
    if GENERATOR_RUN.is_in(folder):
        return load_generator(folder, step)
    if t5x.recognises(folder):
        model, params = t5x.read_generator(folder)
        found = PretrainedGenerator(model, params, None, t5x.MAX_LENGTH)
    elif (folder / huggingface.CONFIG_FILE).is_file():
        found = huggingface_generator.read(folder)
    else:
        raise InputError(
            f"{folder} holds no generator: neither {GENERATOR_RUN.file} (de-jax doc2query train) nor {huggingface.CONFIG_FILE} "
            "(Hugging Face's T5) nor a checkpoint of T5X."
        )
    if tokenizer and found.tokenizer:
        check_own_tokens(found.tokenizer, tokenizer, "the tokenizer of --tokenizer")
    tokenizer = tokenizer or found.tokenizer
    if tokenizer is None:
        raise InputError(f"{folder} holds no vocabulary; give --tokenizer, T5's spiece.model.")
    return GeneratorRun(folder, 0, found.model, found.params, tokenizer, QUERY_LENGTH, found.max_doc_length)
