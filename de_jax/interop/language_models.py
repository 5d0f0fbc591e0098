"""Language models that this library trained, as encoders to start from: a T5 without its decoder, a BERT without its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from de_jax.data.text.tokenizing import Tokenizer
from de_jax.doc2query.generator_run import load_generator
from de_jax.interop.huggingface import ASSUMED, checked_pooling
from de_jax.interop.pretrained import Pretrained, PretrainedSide
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.tower import EncoderConfig, TowerConfig
from de_jax.training.run.language_model import MASKED_LM_RUN, load_masked_lm
from de_jax.types import Params


def read(folder: Path, *, only_sizes: bool = False, pooling: str | None = None) -> Pretrained:
    """The encoder of a language model as a symmetric dual encoder without a projection, with embeddings of length 1.

    Args:
        folder: the run of a generator or of a teller of masked tokens; its newest checkpoint is read.
        only_sizes: `params` are shapes.
        pooling: "mean", "cls" or "lasttoken"; None for "cls" after masked tokens, for "mean" after T5's pretraining.

    Raises:
        InputError: a damaged run, or an unknown pooling.
    """
    if MASKED_LM_RUN.is_in(folder):
        masked = load_masked_lm(folder, only_sizes=only_sizes)
        return _encoder(folder, masked.model.encoder, masked.params, masked.tokenizer, masked.max_length, pooling, "cls")
    generator = load_generator(folder, only_sizes=only_sizes)
    return _encoder(folder, generator.model.t5, generator.params, generator.tokenizer, generator.max_doc_length, pooling, "mean")


def _encoder(
    folder: Path,
    encoder: EncoderConfig,
    params: Params,
    tokenizer: Tokenizer,
    max_length: int,
    pooling: str | None,
    usual: str,
) -> Pretrained:
    pooled: Any = checked_pooling(pooling or usual)
    tower = TowerConfig(encoder, pooling=pooled, projection_dim=None)
    side = PretrainedSide(tokenizer, max_length)
    assumed = "no projection and embeddings of length 1"
    if pooling is None:
        assumed = f"{usual} pooling, {assumed}"
    notes = (f"{folder} holds a language model, {ASSUMED}: {assumed}",)
    kept = {part: params[part] for part in ("embedder", "encoder") if part in params}  # without layers, no encoder
    return Pretrained(DualEncoder(query=tower, doc=tower), {"shared": kept}, side, side, notes)
