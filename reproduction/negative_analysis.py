"""What kinds of negatives teach a run: loss, gradients, margins and ranks on the same training pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from de_jax.data.batches.pair_batches import Negatives, TrainingPairs
from de_jax.data.negatives.generations import Generation, rows_of_pairs
from de_jax.data.stores.corpus import TokenStore
from de_jax.data.text.passages import PassageStore
from de_jax.losses.mined import ance
from de_jax.retrieval import corpus_embeddings, encode
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.training.run.recipe_file import read_recipe_file
from de_jax.training.run.run_folder import Run
from de_jax.training.step import grad_norms
from de_jax.types import PADDING_ID, Array, Batch, InputError, LossFn, Metrics, Params
from reproduction.embedding_analysis import rounded, summary

IN_BATCH, RANDOM = "in_batch", "random"
NUM_LOCAL = 20
"""Negatives drawn for each pair of the unmined kinds; the training negatives are drawn from these."""
WHOLE = "all"
"""The group of all parameters."""
MAX_SCORES = 2**26
"""Scores held at a time."""

GradientsOf = Callable[[Params, Batch], tuple[Array, Metrics, Metrics]]
"""(losses [S], norms [S] of each pair's gradient by group, norms of their mean by group) of pairs with their negatives."""


class Sample(NamedTuple):
    """Some training pairs, and the negatives of each kind for them; documents and queries are rows of the stores."""

    texts: TrainingPairs
    pairs: Int[np.ndarray, "S 2"]
    positives: Sequence[np.ndarray]  # by pair: all known ones of its query, and the document of its id (`texts.drop_identical_ids`)
    kinds: Mapping[str, Int[np.ndarray, "S _"]]  # all negatives, filled up with PADDING_ID
    drawn: Mapping[str, Int[np.ndarray, "S N"]]  # the negatives in the loss and its gradient
    num_pairs: int  # that the sample was drawn from: those with enough negatives of every kind


class Measured(NamedTuple):
    """A kind of negatives at a checkpoint."""

    numbers: dict[str, Any]  # JSON
    margins: Float[np.ndarray, " m"]  # score of the positive less that of a negative, for all negatives of the sample


class AtCheckpoint(NamedTuple):
    """All kinds at a checkpoint."""

    step: int
    kinds: dict[str, Measured]


def sample(
    texts: TrainingPairs,
    generations: Mapping[str, Generation],
    *,
    num_pairs: int = 64,
    num_negatives: int = 1,
    seed: int = 0,
) -> Sample:
    """Training pairs that have negatives of every kind, with two kinds added: documents of other pairs, and any documents.

    Args:
        texts: all training pairs; the documents of a query's pairs are its known positives.
        generations: mined for these pairs, by the name of their kind.
        num_pairs, num_negatives: at most so many pairs, and N that each is trained on.
        seed: of the pairs and of all draws.

    Raises:
        InputError: negatives for other texts or pairs, or no pair with N negatives of every kind.
    """
    if num_pairs < 1 or not 1 <= num_negatives <= NUM_LOCAL:
        raise InputError(f"{num_pairs} pairs of {num_negatives} negatives cannot be; give at least 1 and 1 to {NUM_LOCAL}.")
    if taken := generations.keys() & {IN_BATCH, RANDOM}:
        raise InputError(
            f"negatives are named {taken.pop()!r}, a name reserved for a kind that is always included; choose another name."
        )
    pairs = texts.pairs
    tables = {name: rows_of_pairs(generation, texts)["neg_docs"] for name, generation in generations.items()}
    of_pairs, identical = np.unique(pairs[:, 1]), _identical(texts)
    known = np.unique(np.concatenate([pairs, np.stack([pairs[:, 0], identical], axis=1)[np.isin(identical, of_pairs)]]), axis=0)
    enough = len(of_pairs) - np.bincount(known[:, 0])[pairs[:, 0]] >= num_negatives  # documents of other pairs
    for table in tables.values():
        enough &= np.count_nonzero(table != PADDING_ID, axis=1) >= num_negatives
    if not enough.any():
        raise InputError(f"no training pair has {num_negatives} negatives of every kind; mine more, or ask for fewer.")
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(np.flatnonzero(enough))[:num_pairs])
    positives = [
        np.union1d(pairs[pairs[:, 0] == query, 1], same[same >= 0])
        for query, same in zip(pairs[chosen, 0], identical[chosen, None], strict=True)
    ]
    kinds = {
        IN_BATCH: _others(of_pairs, positives, rng),
        RANDOM: _others(np.arange(texts.doc_store.num_texts), positives, rng),
        **{name: table[chosen] for name, table in tables.items()},
    }
    drawn = {
        name: Negatives(table, num_negatives).draw(np.arange(len(chosen)), (seed, kind))
        for kind, (name, table) in enumerate(kinds.items())
    }
    return Sample(texts, pairs[chosen], positives, kinds, drawn, int(np.count_nonzero(enough)))


def temperature_of(run: Run, given: float | None = None) -> float | None:
    """The temperature of the loss: the one given, or that of the run's training, None for a learned one.

    A run that was not trained here has 1 for dot products as ANCE has it, .01 for cosines as DANCE has it.
    """
    is_learned = run.model.initial_temperature is not None
    if given is not None and (given <= 0 or is_learned):
        raise InputError(f"the temperature {given} cannot be; give one above 0, and none to a model that learns its own.")
    if given is not None or is_learned:
        return given
    trained_with = ((read_recipe_file(run.run_dir) or {}).get("loss") or {}).get("temperature")
    if isinstance(trained_with, float | int):
        return float(trained_with)
    return 0.01 if run.model.query.normalize else 1.0


def analyse(
    runs: Iterable[Run],
    sample: Sample,
    *,
    temperature: float | None,
    groups: Mapping[str, str] | None = None,
    depth: int = 100,
    progress: Callable[[], object] = lambda: None,
) -> Iterator[AtCheckpoint]:
    """The kinds of a sample at each of a run's checkpoints.

    Args:
        runs: checkpoints of one run, made one at a time.
        sample: with the run's tokenizers and passages.
        temperature, depth: of `ance`, and of the ranking that a kind's overlap is with.
        groups: patterns over parameter paths by name; by default `grad_norms.thirds`.
        progress: called after each kind at each checkpoint, and after the ranking of a checkpoint.
    """
    gradients_of: GradientsOf | None = None
    for run in runs:
        if gradients_of is None:
            patterns = {WHOLE: ".*", **(groups or grad_norms.thirds(run.params))}
            norms = grad_norms.group_norms(run.params, patterns)
            gradients_of = make_gradients_of(run.model, functools.partial(ance, temperature=temperature), norms)
        texts = sample.texts
        docs = open_embeddings(corpus_embeddings.cached_docs(run, texts.passages or texts.doc_store, texts.name))[1]
        queries = encode.queries(run, texts.query_store, rows=sample.pairs[:, 0])
        places, measured = places_of(queries, docs, sample), {}
        progress()
        for kind, (ranks, margins) in places.items():
            losses, of_pairs, of_mean = gradients_of(run.params, batch_of(sample, kind, run))
            norms_of = {
                "per_pair": {group: rounded(np.mean(of_pairs[group])) for group in patterns},
                "median": {group: rounded(np.median(of_pairs[group])) for group in patterns},
                "of_mean": {group: rounded(of_mean[group]) for group in patterns},
            }
            numbers = {"loss": rounded(np.mean(losses)), "grad_norm": norms_of, **place_numbers(ranks, margins, depth)}
            measured[kind] = Measured(numbers, margins[ranks > 0])
            progress()
        yield AtCheckpoint(run.step, measured)


def make_gradients_of(model: Any, loss: LossFn, norms: Callable[[Params], Metrics]) -> GradientsOf:
    """Takes pairs one after another, so that the memory of one is enough; compiled once, without dropout.

    The mean of the pairs' gradients is the gradient of their batch, since no pair meets another's negatives.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def add(total: Params, params: Params, pair: Batch) -> tuple[Params, Array, Metrics]:
        value, gradient = jax.value_and_grad(lambda params: loss(model.embed(params, pair))[0])(params)
        return jax.tree.map(jnp.add, total, gradient), value, norms(gradient)

    norms_of_total = jax.jit(norms)

    def gradients_of(params: Params, pairs: Batch) -> tuple[Array, Metrics, Metrics]:
        total, found = jax.tree.map(jnp.zeros_like, params), []
        for row in range(len(pairs.query_id)):
            total, *of_pair = add(total, params, jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], pairs))
            found.append(of_pair)
        losses, of_pairs = jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(found))
        return losses, of_pairs, {group: float(norm) / len(losses) for group, norm in norms_of_total(total).items()}

    return gradients_of


def batch_of(sample: Sample, kind: str, run: Run) -> Batch:
    """The pairs with the drawn negatives of a kind, padded; as wide for all kinds."""
    passages, (query_rows, doc_rows) = sample.texts.passages, sample.pairs.T

    def texts_of(docs: np.ndarray) -> np.ndarray:
        return passages.of_docs(docs) if passages else docs

    every = np.concatenate([texts_of(docs.reshape(-1)) for docs in (doc_rows, *sample.drawn.values())])
    pad_docs = _padding(passages or sample.texts.doc_store, every, run.doc.max_length)
    return Batch(
        query=_padding(sample.texts.query_store, query_rows, run.query.max_length)(query_rows),
        doc=pad_docs(texts_of(doc_rows)),
        query_id=query_rows.astype(np.int32),
        doc_id=doc_rows.astype(np.int32),
        neg_docs=pad_docs(texts_of(sample.drawn[kind])),
        neg_doc_ids=sample.drawn[kind],
    )


def places_of(
    queries: Float[np.ndarray, "S D"], docs: Float[np.ndarray, "p D"], sample: Sample
) -> dict[str, tuple[Int[np.ndarray, "S _"], Float[np.ndarray, "S _"]]]:
    """The rank of every negative by kind, and its margin: the positive's score less its own.

    Ranks are from 1, among all documents but the query's known positives; of equal scores all have the best rank. 0 and nan stand
    where a pair has no negative. `docs` are passages where the texts have some; then a document scores as the best of its own.
    """
    passages = sample.texts.passages
    firsts = np.flatnonzero(np.diff(passages.doc_rows, prepend=-1)) if passages else np.arange(len(docs))
    ranks = {kind: np.zeros(table.shape, np.int64) for kind, table in sample.kinds.items()}
    margins = {kind: np.full(table.shape, np.nan, np.float32) for kind, table in sample.kinds.items()}
    block = max(1, MAX_SCORES // len(docs))
    for start in range(0, len(queries), block):
        all_scores = np.maximum.reduceat(queries[start : start + block] @ np.asarray(docs).T, firsts, axis=1)
        for pair, scores in enumerate(all_scores, start):
            rising = np.sort(np.delete(scores, sample.positives[pair]))
            for kind, table in sample.kinds.items():
                is_there = table[pair] != PADDING_ID
                found = scores[table[pair][is_there]]
                ranks[kind][pair, is_there] = 1 + len(rising) - np.searchsorted(rising, found, side="right")
                margins[kind][pair, is_there] = scores[sample.pairs[pair, 1]] - found
    return {kind: (ranks[kind], margins[kind]) for kind in sample.kinds}


def place_numbers(ranks: Int[np.ndarray, "S K"], margins: Float[np.ndarray, "S K"], depth: int) -> dict[str, Any]:
    """Statistics of the ranks and margins of one kind of negatives; `overlap` is the share within the first `depth` ranks."""
    is_there: Bool[np.ndarray, "S K"] = ranks > 0
    near = np.count_nonzero((ranks <= depth) & is_there, axis=1) / np.count_nonzero(is_there, axis=1)
    return {
        "margin": summary(margins[is_there]),
        "share_above_positive": rounded(np.mean(margins[is_there] < 0)),
        "overlap": rounded(np.mean(near)),
        "mean_rank": rounded(np.mean(ranks[is_there])),
    }


def _identical(texts: TrainingPairs) -> Int[np.ndarray, " P"]:
    """By pair, the document with the id of its query, which is not a negative of it; -1 if missing or kept."""
    if not texts.drop_identical_ids:
        return np.full(len(texts.pairs), -1)
    return texts.doc_store.rows_of([texts.query_store.ids[row] for row in texts.pairs[:, 0].tolist()])


def _others(candidates: np.ndarray, positives: Sequence[np.ndarray], rng: np.random.Generator) -> Int[np.ndarray, "S _"]:
    """`NUM_LOCAL` of the candidates for each pair, fewer where there are not as many, without the positives."""
    table = np.full((len(positives), NUM_LOCAL), PADDING_ID, np.int32)
    for row, known in zip(table, positives, strict=True):
        drawn = candidates[rng.choice(len(candidates), min(len(candidates), NUM_LOCAL + len(known)), replace=False)]
        drawn = drawn[~np.isin(drawn, known)][:NUM_LOCAL]
        row[: len(drawn)] = drawn
    return table


def _padding(store: TokenStore | PassageStore, rows: np.ndarray, max_length: int) -> Callable[[np.ndarray], np.ndarray]:
    """Lays out rows [...] of a store as tokens [..., L], where L is the longest text's of `rows`."""
    width = int(store.lengths(max_length)[rows[rows >= 0]].max())
    return lambda rows: store.pad(rows.reshape(-1), max_length, width).reshape(*rows.shape, width)
