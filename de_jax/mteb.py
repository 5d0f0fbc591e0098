"""A model as MTEB's benchmarks take it (mteb 2): `mteb.evaluate(de_jax.mteb.Model(model, name="my-org/sde"), tasks)`.

Nothing of mteb is imported before its own code asks for the model's description.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from de_jax.types import InputError


@runtime_checkable
class Encoder(Protocol):
    """What `Model` needs of a model; what `de_jax.load` gives has it, and takes a `prompt` too."""

    def encode_query(self, texts: Sequence[str]) -> Float[np.ndarray, "n d"]:
        """Embeddings of queries, float32."""

    def encode_document(self, texts: Sequence[str]) -> Float[np.ndarray, "n d"]:
        """Embeddings of documents, float32."""


class Model:
    """Follows mteb's `EncoderProtocol`.

    Args:
        model: gives the embeddings; its own prompts and lengths hold if no other is given.
        name: "organisation/name", under which mteb files the results.
        revision: of the model, also for that; None for none.
        prompts: before the texts of a task, by the first of mteb's keys that is there: "<task>-<kind>", "<task>", "<type>-<kind>",
            "<type>", "<kind>", with the task's type, and "query" or "document" as the kind; by default those of the model's folder.
        instruction: for an instruction model, the text before queries and texts of neither kind, such as
            "Instruct: {instruction}\nQuery: "; {instruction} is mteb's for the task. Documents get none.
        languages: of the model, such as ["eng-Latn"], for its description.
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
        prompts: Mapping[str, str] | None = None,
        instruction: str | None = None,
        languages: Sequence[str] | None = None,
        others: Literal["query", "document"] = "document",
    ) -> None:
        if getattr(model, "max_passages", 1) > 1:
            raise InputError("this model has several vectors a document, and mteb takes one; score it with de-jax evaluate beir.")
        self._encode = {"query": model.encode_query, "document": model.encode_document}
        self._model, self._others, self._instruction = model, others, instruction
        self._prompts = getattr(model, "prompts", {}) if prompts is None else prompts
        self._about = {"name": name, "revision": revision, "languages": list(languages) if languages else None}

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: Any = None, task_metadata: Any = None, **of_the_task: Any
    ) -> Float[np.ndarray, "n d"]:
        """Embeddings of the texts of all batches, in their order.

        Args:
            inputs: batches with "text", a list of texts, where mteb has put a document's title before its body; a model with fields
                of documents takes "title" and "body".
            prompt_type: mteb's `PromptType`, or its value: "query", "document", or None for neither.
            task_metadata: mteb's `TaskMetadata`, which decides the prompt.
            of_the_task: its split, subset and mteb's batch size, which change nothing here.
        """
        kind = getattr(prompt_type, "value", prompt_type)
        prompt = self.prompt(task_metadata, kind)
        has_fields = kind == "document" and hasattr(self._model, "run") and bool(self._model.run.doc.fields)
        texts = [text for batch in inputs for text in (_documents(batch) if has_fields else batch["text"])]
        return self._encode[str(kind or self._others)](texts, **({} if prompt is None else {"prompt": prompt}))

    def prompt(self, task_metadata: Any, kind: str | None) -> str | None:
        """The text before those of a task; None for the model's own prompt. `kind` is "query", "document", or None for neither."""
        names = [getattr(task_metadata, name, None) for name in ("name", "type")]
        keys = [key for name in names if name for key in ((f"{name}-{kind}", name) if kind else (name,))] + [kind]
        if found := [self._prompts[key] for key in keys if key in self._prompts]:
            return found[0]
        if self._instruction is None or task_metadata is None:
            return None
        if kind == "document":
            return ""
        own = task_metadata.prompt
        own = own.get(kind or "query") if isinstance(own, Mapping) else own
        if not own:
            from mteb.abstasks.abstask import get_abstask_prompt

            own = get_abstask_prompt(task_metadata.name)
        return self._instruction.format(instruction=own)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Float[np.ndarray, "m n"]:
        """Inner products of all embeddings of the one with all of the other."""
        return np.asarray(embeddings1, np.float32) @ np.asarray(embeddings2, np.float32).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Float[np.ndarray, " n"]:
        """Inner products of the embeddings of each row."""
        return np.einsum("nd,nd->n", np.asarray(embeddings1, np.float32), np.asarray(embeddings2, np.float32))

    @property
    def mteb_model_meta(self) -> Any:
        """mteb's `ModelMeta`, with as much as is known."""
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        known: dict[str, Any] = {**self._about, "framework": ["JAX"], "similarity_fn_name": ScoringFunction.DOT_PRODUCT}
        known["use_instructions"] = bool(self._prompts or self._instruction)
        if run := getattr(self._model, "run", None):
            import jax

            leaves = jax.tree_util.tree_leaves_with_path(run.params)
            sizes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.size for path, leaf in leaves}
            tables = [size for path, size in sizes.items() if path.endswith("/embedding")]
            known |= {"embed_dim": getattr(self._model, "embedding_dim", None), "max_tokens": run.doc.max_length}
            known |= {"n_parameters": sum(sizes.values()), "n_embedding_parameters": sum(tables)}
        return ModelMeta.create_empty(overwrites=known)


def _documents(batch: Mapping[str, Any]) -> list[Any]:
    if "body" not in batch:
        return list(batch["text"])
    titles = batch.get("title") or [""] * len(batch["body"])
    return [{"title": title or "", "text": body} for title, body in zip(titles, batch["body"], strict=True)]
