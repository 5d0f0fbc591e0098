"""The hard negatives of a run: it follows the generations in a folder, which a miner writes beside it.

<run_dir>/switches.jsonl
    {"step", "generation"}: from which step on which generation gives the run's negatives

A switch is on the disk before a batch is made by it, and a generation never changes. So a run that was killed sees the same
negatives in the same order when it continues, however quick the miner was in the meantime.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from de_jax.data import files, generations
from de_jax.data.batches import Negatives
from de_jax.data.corpus import TokenStore
from de_jax.data.generations import Generation
from de_jax.data.passages import PassageStore
from de_jax.data.reading import read_lines
from de_jax.types import PADDING_ID, InputError

SWITCHES_FILE = "switches.jsonl"
FIRST_SWITCH_SECONDS = 120.0


class TrainingTexts(NamedTuple):
    """The training pairs, and the texts that their negatives are found among."""

    name: str  # of the data set
    query_store: TokenStore
    doc_store: TokenStore
    pairs: np.ndarray  # int32 [P, 2] (query row, document row)
    hashes: Mapping[str, str]  # what manifests must say of "queries" and "docs"; empty for no such check
    passages: PassageStore | None = None  # where a document is several, of which the best one for a query counts
    drop_identical_ids: bool = True  # a document with the id of a query is no negative of it; see `input_policy`


class Switch(NamedTuple):
    """From the batch of update `step` on (the first is 0), negatives are those of `generation`."""

    step: int
    generation: int


class MinedNegatives:
    """A run's hard negatives step by step: which generation is in force, and its rows for the training pairs.

    Attributes:
        negatives_dir: holds the generations.
        texts: the pairs, and the texts of the rows.
        num_drawn: "neg_docs" and "neg_queries", how many of each a row of a batch gets; those with none are absent.
        switches: all so far, by rising step; none before `begin`.
    """

    def __init__(
        self,
        negatives_dir: str | Path,
        switches_file: str | Path | None,
        texts: TrainingTexts,
        *,
        num_drawn: Mapping[str, int],
        is_first: bool = True,
    ) -> None:
        """Reads nothing yet.

        Args:
            negatives_dir, texts, num_drawn: see above.
            switches_file: of the run; None keeps them in memory.
            is_first: whether this process, of all that train, writes the file; the others wait for it.
        """
        self.negatives_dir, self._file = Path(negatives_dir), Path(switches_file) if switches_file else None
        self.texts, self._is_first = texts, is_first
        self.num_drawn = {name: number for name, number in num_drawn.items() if number}
        self._latest: tuple[int, dict[str, Negatives]] | None = None
        self._next: tuple[int, dict[str, Negatives]] | None = None
        self._refused: dict[int, Any] = {}
        self.switches: list[Switch] = []

    def check(self) -> None:
        """Looks for a generation that a new run can begin with, before anything is written.

        Raises:
            InputError: there is none, or the newest is damaged or was mined over other texts.
        """
        if self._read(at_least=0):
            return
        there = generations.numbers(self.negatives_dir)
        if not there:
            raise InputError(f"{self.negatives_dir} holds no generation of negatives; make one with de-jax mine_negatives.")
        self._next = self._opened(there[-1])

    def begin(self, step: int = 0, known: Sequence[Switch] = ()) -> None:
        """Goes on as the file of switches says; a run without one begins with the newest generation there is.

        Args:
            step: that training goes on from.
            known: the switches that a checkpoint of the run was saved with. A file that is lost is written again by them.

        Raises:
            InputError: no generation, a damaged one that the run has used, one mined over other texts, or a file that does not
                say what the checkpoint says.
        """
        known = list(known)
        self.switches = self._read(at_least=0 if self._is_first else max(1, len(known)))
        if self.switches and self.switches[: len(known)] != known:
            raise InputError(
                f"{self._file} does not begin with the {len(known)} switches that the checkpoint of step {step} was trained with; "
                "restore the file, or remove it and it is written again by the checkpoint."
            )
        if not self.switches and known:
            self._write(known)
            self.switches = known
        if not self.switches:
            self.check()
            self.record(Switch(0, generations.numbers(self.negatives_dir)[-1]))
        self.at(step)

    def at(self, step: int) -> dict[str, Negatives]:
        """The negatives in force at a step, by the name of their field in a batch."""
        number = self.generation_at(step)
        if self._latest is None or self._latest[0] != number:
            self._latest = self._next if self._next and self._next[0] == number else self._opened(number)
        return self._latest[1]

    def generation_at(self, step: int) -> int:
        """The number of the generation in force at a step."""
        return max(switch for switch in self.switches if switch.step <= step).generation

    def newer(self) -> int | None:
        """The newest generation beyond the last switch's that is whole and fits the training pairs.

        Warns of others, once; one that was still being copied is looked at again when it has changed.
        """
        for number in reversed(generations.numbers(self.negatives_dir)):
            if number <= self.switches[-1].generation:
                return None
            state = _state(generations.generation_dir(self.negatives_dir, number))
            if self._refused.get(number) == state:
                continue
            try:
                self._next = self._opened(number)
                return number
            except (InputError, OSError) as error:
                self._refused[number] = state
                warnings.warn(f"generation {number} of the negatives is passed over: {error}", stacklevel=2)
        return None

    def record(self, switch: Switch) -> None:
        """Adds a switch beyond the last one, on the disk first; of several processes the first one writes it."""
        if self._is_first:
            self._write([switch])
        self.switches.append(switch)

    def _opened(self, number: int) -> tuple[int, dict[str, Negatives]]:
        rows = rows_of_pairs(generations.open_generation(self.negatives_dir, number), self.texts)
        return number, {name: Negatives(rows[name], drawn) for name, drawn in self.num_drawn.items()}

    def _write(self, switches: Sequence[Switch]) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.append_text(self._file, "".join(json.dumps(switch._asdict()) + "\n" for switch in switches))

    def _read(self, *, at_least: int) -> list[Switch]:
        """The file's switches, once so many of them are there."""
        if self._file is None:
            return []
        deadline = time.monotonic() + FIRST_SWITCH_SECONDS
        while len(switches := read_switches(self._file)) < at_least:
            if time.monotonic() > deadline:
                raise InputError(f"{self._file} was not written by the first process; all processes must see the same run_dir.")
            time.sleep(0.1)
        return switches


def follow(negatives_dir: str, run_dir: str, texts: TrainingTexts, **options: Any) -> MinedNegatives:
    """The negatives of a run; "{run_dir}" in `negatives_dir` stands for its folder, and `options` are those of `MinedNegatives`."""
    switches_file = Path(run_dir) / SWITCHES_FILE if run_dir else None
    return MinedNegatives(negatives_dir.format(run_dir=run_dir), switches_file, texts, **options)


def rows_of_pairs(generation: Generation, texts: TrainingTexts) -> dict[str, np.ndarray]:
    """The negatives of each training pair as rows of the stores, filled up with `PADDING_ID`.

    Args:
        generation: mined for these pairs, or for more.
        texts: the pairs, and the texts of the rows.

    Returns:
        "neg_docs" int32 [P, longest list] and "neg_queries" int32 [P, longest list].

    Raises:
        InputError: mined over other texts, ids that are not in the stores, or none of the pairs.
    """
    for name, expected in texts.hashes.items():
        if generation.manifest.get(name) != expected:
            raise InputError(f"{generation.folder} was mined from other {name} than are trained on; mine again.")
    stores = {"neg_docs": texts.doc_store, "neg_queries": texts.query_store}
    mined = list(generations.read_mined(generation))
    own = [texts.query_store.rows_of([line.query_id for line in mined]), texts.doc_store.rows_of([line.doc_id for line in mined])]
    place = {pair: row for row, pair in enumerate(map(tuple, np.asarray(texts.pairs).tolist()))}
    chosen = [
        (place[pair], line)
        for pair, line in zip(zip(*(rows.tolist() for rows in own), strict=True), mined, strict=True)
        if pair in place
    ]
    if not chosen:
        raise InputError(f"{generation.folder} was mined for none of the training pairs; mine for this data set and split.")
    return {
        name: _table(generation, [(row, getattr(line, field)) for row, line in chosen], len(texts.pairs), stores[name])
        for name, field in (("neg_docs", "neg_doc_ids"), ("neg_queries", "neg_query_ids"))
    }


def read_switches(path: str | Path) -> list[Switch]:
    """The switches of a run so far, by rising step.

    Raises:
        InputError: a line that is none.
    """
    path = Path(path)
    switches: list[Switch] = []
    for line, raw in read_lines(path) if path.is_file() else ():
        try:
            switch = Switch(**{name: int(value) for name, value in json.loads(raw).items()})
            if switches and switch.step <= switches[-1].step:
                raise ValueError
        except (ValueError, TypeError, AttributeError):
            raise InputError(f"{path}, line {line}: expected a step beyond the last one and its generation.") from None
        switches.append(switch)
    return switches


def _state(folder: Path) -> list[tuple[str, int]]:
    """What changes while a folder is copied, or removed."""
    try:
        return sorted((path.name, path.stat().st_size) for path in folder.iterdir())
    except OSError:
        return []


def _table(generation: Generation, lists: list[tuple[int, list[str]]], num_pairs: int, store: TokenStore) -> np.ndarray:
    """The rows of lists of ids, [num_pairs, longest list]; a list of the same pair that comes later counts."""
    ids = [text_id for _, one in lists for text_id in one]
    rows = store.rows_of(ids)
    if (rows < 0).any():
        raise InputError(f"{generation.folder}: the negative {ids[int(np.argmin(rows))]!r} is in none of the texts; mine again.")
    table = np.full((num_pairs, max(len(one) for _, one in lists)), PADDING_ID, np.int32)
    ends = np.cumsum([len(one) for _, one in lists])
    for (pair, one), found in zip(lists, np.split(rows, ends[:-1]), strict=True):
        table[pair] = PADDING_ID
        table[pair, : len(one)] = found
    return table
