"""A model as MTEB's benchmarks take it (mteb 2): `mteb.evaluate(de_jax.mteb.Model(model, name="my-org/sde"), tasks)`.

Nothing of mteb is imported before its own code asks for the model's description.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from de_jax.types import InputError


@runtime_checkable
class Encoder(Protocol):
    """What `Model` needs of a model; what `de_jax.load` gives has it."""

    def encode_query(self, texts: Sequence[str]) -> Float[np.ndarray, "n d"]:
        """Embeddings of queries, float32."""

    def encode_document(self, texts: Sequence[str]) -> Float[np.ndarray, "n d"]:
        """Embeddings of documents, float32."""


class Model:
    """Follows mteb's `EncoderProtocol`.

    Args:
        model: gives the embeddings; its own prompts and lengths hold, and mteb's are not added.
        name: "organisation/name", under which mteb files the results.
        revision: of the model, also for that; None for none.
        others: which tower embeds texts that are neither queries nor documents, as in tasks of similarity or classification.

    Raises:
        InputError: the model has several vectors a document (`max_passages`).

    Example:
        >>> class Lengths:
        ...     def encode_query(self, texts):
        ...         return np.array([[len(text), 1.0] for text in texts], np.float32)
        ...
        ...     encode_document = encode_query
        >>> model = Model(Lengths(), name="my-org/lengths")
        >>> model.encode([{"text": ["a", "bcd"]}, {"text": ["ef"]}], prompt_type="query")[:, 0].tolist()
        [1.0, 3.0, 2.0]
    """

    def __init__(
        self,
        model: Encoder,
        *,
        name: str,
        revision: str | None = None,
        others: Literal["query", "document"] = "document",
    ) -> None:
        if getattr(model, "max_passages", 1) > 1:
            raise InputError("this model has several vectors a document, and mteb takes one; score it with de-jax evaluate beir.")
        self._encode = {"query": model.encode_query, "document": model.encode_document}
        self._name, self._revision, self._others = name, revision, others

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: Any = None, **of_the_task: Any
    ) -> Float[np.ndarray, "n d"]:
        """Embeddings of the texts of all batches, in their order.

        Args:
            inputs: batches with "text", a list of texts; mteb has put a document's title before its body.
            prompt_type: mteb's `PromptType`, or its value: "query", "document", or None for neither.
            of_the_task: its metadata, split, subset and mteb's batch size, which change nothing here.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        return self._encode[str(getattr(prompt_type, "value", prompt_type) or self._others)](texts)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Float[np.ndarray, "m n"]:
        """Inner products of all embeddings of the one with all of the other."""
        return np.asarray(embeddings1, np.float32) @ np.asarray(embeddings2, np.float32).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Float[np.ndarray, " n"]:
        """Inner products of the embeddings of each row."""
        products: np.ndarray = np.einsum("nd,nd->n", np.asarray(embeddings1, np.float32), np.asarray(embeddings2, np.float32))
        return products

    @property
    def mteb_model_meta(self) -> Any:
        """mteb's `ModelMeta`, with as much as is known."""
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        known = {"name": self._name, "revision": self._revision}
        return ModelMeta.create_empty(overwrites={**known, "framework": ["JAX"], "similarity_fn_name": ScoringFunction.DOT_PRODUCT})
