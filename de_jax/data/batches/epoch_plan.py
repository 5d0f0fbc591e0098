"""Which pairs make up which batch of an epoch, where no batch holds a text twice."""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from de_jax.types import InputError

# Batches a displaced pair is tried in before it waits for another epoch; keeps planning linear where one text is in most pairs.
_MAX_TRIES = 32


class EpochPlan:
    """Which pairs make up which batch of an epoch. Holds the last plan, as consecutive batches come from one epoch.

    Attributes:
        num_batches: of an epoch, the same for all.
    """

    def __init__(
        self,
        pairs: np.ndarray,
        batch_size: int,
        seed: int,
        unique_in_batch: bool,
        epoch_order: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        """Plans the first epoch; the arguments are those of `PairsOptions` and `TrainingPairs`.

        Raises:
            InputError: not even one batch can be filled.
        """
        self._pairs = np.stack([_by_first_place(texts) for texts in pairs.T], axis=1)
        self._batch_size = batch_size
        self._seed = seed
        self._unique = unique_in_batch
        self._order = epoch_order
        _require_enough(pairs, batch_size, unique_in_batch)
        self._most = _most_batches(self._pairs, batch_size) if unique_in_batch and epoch_order is None else None
        self._first = self._full_batches(0)
        self._latest = (0, self._first)
        self.num_batches = len(self._first)
        if not self.num_batches:
            raise InputError(
                f"no batch of {batch_size} pairs without a repeated query or document was found; "
                "take a smaller batch_size, or unique_in_batch=False."
            )

    @property
    def num_left_out(self) -> int:
        """Pairs that the first epoch leaves out because their texts repeat, in whole batches."""
        return max(0, len(self._pairs) // self._batch_size - self.num_batches) * self._batch_size if self._order is None else 0

    def epoch(self, number: int) -> Int64[np.ndarray, "S B"]:
        """Rows of `pairs`, one batch per row."""
        known, plan = self._latest
        if known == number:
            return plan
        plan = self._full_batches(number)
        # Where repeated texts leave this shuffle with fewer full batches than the first, some are seen twice.
        plan = plan[np.arange(self.num_batches) % len(plan)] if len(plan) else self._first
        self._latest = (number, plan)
        return plan

    def pairs_of(self, number: int) -> Int64[np.ndarray, " B"]:
        """The rows of `pairs` in a batch, by the number of batches before it."""
        epoch, place = divmod(number, self.num_batches)
        return self.epoch(epoch)[place]

    def _full_batches(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(len(self._pairs)) if self._order is None else self._order(epoch)
        if self._most and any(np.bincount(texts).max() > self._most for texts in self._pairs.T):
            order = self._scheduled(epoch, order, rng)
        return full_batches(self._pairs, order, self._batch_size, self._unique)

    def _scheduled(self, epoch: int, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """An order whose batches hold texts that are in too many pairs once each.

        An epoch of S batches takes S pairs of such a text, the next epoch another S. The pairs of one text after another are dealt
        to the batches in turn, so no batch gets a text twice; queries are dealt, or documents, as one of them has the most pairs.
        """
        assert self._most
        kept = np.random.default_rng(self._seed).permutation(len(self._pairs))
        for texts in self._pairs.T:
            kept = _in_turn(kept, texts[kept], self._most, epoch)
        is_kept = np.zeros(len(order), bool)
        is_kept[kept] = True
        kept = order[is_kept[order]]
        dealt = self._pairs[:, np.argmax([np.bincount(texts).max() for texts in self._pairs.T])]
        kept = kept[np.argsort(rng.permutation(int(dealt.max()) + 1)[dealt[kept]], kind="stable")]
        num_batches = min(self._most, len(kept) // self._batch_size)
        batches, left = np.split(kept, [num_batches * self._batch_size])
        return np.concatenate([batches.reshape(self._batch_size, num_batches).T.reshape(-1), left])


def _by_first_place(texts: np.ndarray) -> np.ndarray:
    """The texts numbered in the order of their first places, so that a plan is the same however a store numbers them."""
    _, first, which = np.unique(texts, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[which]


def _most_batches(pairs: np.ndarray, batch_size: int) -> int:
    """The most batches that pairs can fill where each holds a text once at most."""
    most = len(pairs) // batch_size
    for texts in pairs.T:
        count = np.bincount(texts)
        while most and np.minimum(count, most).sum() < most * batch_size:
            most = min(most - 1, int(np.minimum(count, most).sum()) // batch_size)
    return most


def _in_turn(rows: np.ndarray, texts: np.ndarray, most: int, epoch: int) -> np.ndarray:
    """At most `most` rows of each text; in each epoch the next ones, until all had their turn."""
    order, count = np.argsort(texts, kind="stable"), np.bincount(texts)
    place = np.empty(len(rows), np.int64)
    place[order] = np.arange(len(rows)) - (np.cumsum(count) - count)[texts[order]]
    return rows[(place - epoch * most) % count[texts] < most]


def full_batches(
    pairs: Int64[np.ndarray, "P 2"], order: Int64[np.ndarray, " O"], batch_size: int, unique_in_batch: bool
) -> Int64[np.ndarray, "S B"]:
    """Rows of `pairs` in an order, one batch per row; where none may hold a text twice, as many as are found."""
    batch = np.arange(len(order)) // batch_size
    queries, docs = pairs[order].T
    displaced = _repeats(batch, queries) | _repeats(batch, docs) if unique_in_batch else np.zeros(len(order), bool)
    if displaced.any():
        batch = _rehouse(batch, queries, docs, displaced, batch_size)
        order = order[np.argsort(batch, kind="stable")[np.count_nonzero(batch < 0) :]]
    full = len(order) // batch_size
    return order[: full * batch_size].reshape(full, batch_size)


def _rehouse(batch: np.ndarray, queries: np.ndarray, docs: np.ndarray, displaced: np.ndarray, batch_size: int) -> np.ndarray:
    """Moves displaced pairs into batches where their query and document are new; dissolves batches that cannot be filled.

    Args:
        batch, queries, docs: [P] each pair's batch and texts, in shuffled order.
        displaced: [P] pairs that repeat a text of their batch.
        batch_size: pairs of a full batch.

    Returns:
        [P] the batch of each pair; -1 for a pair that has none. Every batch that is left is full.
    """
    batch = np.where(displaced, -1, batch)
    size = np.bincount(batch[batch >= 0], minlength=int(batch.max()) + 1)
    members: dict[int, list[int]] = {index: [] for index in np.flatnonzero(size < batch_size).tolist()}
    for pair in np.flatnonzero((batch >= 0) & (size[batch] < batch_size)).tolist():
        members[int(batch[pair])].append(pair)
    query_of, doc_of = queries.tolist(), docs.tolist()
    held = {index: ({query_of[i] for i in pairs}, {doc_of[i] for i in pairs}) for index, pairs in members.items()}
    unfilled = collections.deque(members)
    homeless = np.flatnonzero(displaced).tolist()
    by_size: list[int] | None = None
    while unfilled:
        for pair in homeless:
            for _ in range(min(_MAX_TRIES, len(unfilled))):
                index = unfilled[0]
                held_queries, held_docs = held[index]
                if query_of[pair] not in held_queries and doc_of[pair] not in held_docs:
                    held_queries.add(query_of[pair])
                    held_docs.add(doc_of[pair])
                    members[index].append(pair)
                    batch[pair] = index
                    if len(members[index]) == batch_size:
                        unfilled.popleft()
                    break
                unfilled.rotate(-1)
        # The emptiest batch gives its pairs to the others.
        by_size = by_size or sorted(unfilled, key=lambda index: len(members[index]), reverse=True)
        while by_size and len(members[by_size[-1]]) == batch_size:
            by_size.pop()
        if by_size:
            unfilled.remove(by_size[-1])
            homeless = members.pop(by_size.pop())
            batch[homeless] = -1
    return batch


def _repeats(batch: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """[P] whether the text of a pair already stands in an earlier pair of its batch."""
    _, first = np.unique(batch * (int(texts.max()) + 1) + texts, return_index=True)
    repeats = np.ones(len(texts), dtype=bool)
    repeats[first] = False
    return repeats


def _require_enough(pairs: np.ndarray, batch_size: int, unique_in_batch: bool) -> None:
    """Raises InputError where not even one batch can be filled, whatever the shuffle."""
    if batch_size > len(pairs):
        raise InputError(f"batch_size {batch_size} is more than the {len(pairs)} training pairs; take a smaller one.")
    for name, column in zip(("queries", "documents"), pairs.T, strict=True):
        distinct = len(np.unique(column)) if unique_in_batch else batch_size
        if distinct < batch_size:
            raise InputError(
                f"batch_size {batch_size} is more than the {distinct} different {name} of the training pairs; "
                "take a smaller one, or unique_in_batch=False."
            )
