"""A corpus in parts: independent jobs encode and search one each, in any order, and the last job joins them.

<folder>                     of the whole corpus; complete once the parts are joined
<folder>.parts/0_of_4        the embeddings of one part, see `embedding_files`
<folder>.parts/0_of_4-<key>  the best documents of that part for some queries: doc_rows.npy, scores.npy and a manifest

In a bucket, each job has a copy of its own part (`begin`), sees which others are there (`look`), and whoever joins them gets all
(`fetch`). The folder of parts is held by `leases.in_turn` for that time.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from de_jax.files import leases, mirror_names, mirrors, outputs, schema
from de_jax.files.kind import Kind
from de_jax.files.reading import read_array
from de_jax.retrieval.embedding_files import EMBEDDINGS, EmbeddingWriter, open_embeddings
from de_jax.types import InputError, Ranking

RANKING = Kind("ranking", {"num_queries": schema.integer(1), "depth": schema.integer(1)}, make="run its part of the work again")
_PART_NAME = re.compile(r"(\d+)_of_(\d+)(-.+)?")
_QUERIES = 4096
"""Queries whose rankings are merged at a time."""


class Part(NamedTuple):
    """One of `total` parts, counted from 0 as schedulers count jobs.

    Example:
        >>> part = Part.of("1/4")
        >>> part.rows(10, multiple=2), str(part)
        (range(2, 4), '1/4')
    """

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    @classmethod
    def of(cls, text: str) -> Part:
        """The part that a text such as "0/4" names.

        Raises:
            InputError: another form, or a part that is not one of so many.
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
        if not found or int(found[1]) >= int(found[2]):
            raise InputError(f"the shard is {text!r}; give its number from 0 and how many there are: 0/4, 1/4, 2/4 or 3/4.")
        return cls(int(found[1]), int(found[2]))

    def rows(self, num_texts: int, multiple: int) -> range:
        """The texts of this part: whole blocks of `multiple`, so that a block is encoded alike in a part and in the whole.

        The range is empty where there are more parts than blocks.
        """
        num_blocks = -(-num_texts // multiple)
        first, last = (num_blocks * number // self.total * multiple for number in (self.number, self.number + 1))
        return range(first, min(last, num_texts))

    def folder(self, whole: Path) -> Path:
        """Where the embeddings of this part lie."""
        return folder_of(whole) / f"{self.number}_of_{self.total}"

    def all(self) -> list[Part]:
        """All parts, in order."""
        return [Part(number, self.total) for number in range(self.total)]


def folder_of(whole: Path) -> Path:
    """The folder of the parts of a whole."""
    return whole.with_name(f"{whole.name}{mirror_names.PARTS}")


def begin(whole: Path, part: Part) -> Path:
    """The folder of a part, with what another machine finished of it. Warns of parts that do not fit to it."""
    folder = part.folder(whole)
    mirrors.refresh(folder.parent)
    mirrors.bring(folder)
    found = sorted(name for name in mirrors.entries(folder.parent) if _PART_NAME.fullmatch(name))
    if others := [name for name in found if int(_PART_NAME.fullmatch(name)[2]) != part.total]:  # type: ignore[index]
        warnings.warn(
            f"{folder.parent} holds {others[0]}, which does not fit to shard {part}; give all jobs the same number of shards, or "
            "ignore this if the others will not continue.",
            stacklevel=3,
        )
    return folder


def look(whole: Path) -> None:
    """Shows this job's finished part to others, and looks for theirs."""
    mirrors.push_all(seconds=0)
    for folder in (whole, folder_of(whole)):
        mirrors.refresh(folder)


def fetch(whole: Path) -> None:
    """Gets everything that other jobs have finished."""
    mirrors.refresh(whole)
    mirrors.refresh(folder_of(whole), with_parts=True)


def is_done(folder: Path, kind: Kind, *, is_here: bool = False) -> bool:
    """Whether a part is complete, here or on another machine.

    Args:
        folder: of the part.
        kind: of the folder.
        is_here: asks for this machine alone.
    """
    return kind.is_in(folder) if is_here else mirrors.is_there(folder / kind.file)


def embeddings(whole: Path, part: Part) -> tuple[list[str], np.ndarray, range] | None:
    """The ids and the memory-mapped embeddings of a part, and which texts of the corpus they are; None of a part without texts.

    They are read from the folder of the whole corpus where that is complete.

    Raises:
        InputError: the folder is incomplete or damaged.
    """
    own = part.folder(whole)
    if EMBEDDINGS.is_in(own):
        ids, found, manifest = open_embeddings(own)
        return ids, found, range(*manifest["rows"])
    if not EMBEDDINGS.is_in(whole):
        return None
    ids, found, manifest = open_embeddings(whole)
    rows = part.rows(len(ids), manifest["texts_per_shard"])
    return (ids[rows.start : rows.stop], found[rows.start : rows.stop], rows) if rows else None


def unfinished(
    whole: Path, part: Part, kind: Kind = EMBEDDINGS, block: str = "texts_per_shard", *, is_here: bool = False
) -> list[Part]:
    """The parts that are not complete; none once the whole is.

    Args:
        whole: the folder of the whole corpus.
        part: any one of the parts.
        kind: of their folders, whose manifests give `of`, the number of all texts.
        block: the manifest's entry with the size of a block; see `Part.rows`.
        is_here: see `is_done`.
    """
    if kind.is_in(whole):
        return []
    manifests = {one: kind.read_manifest(one.folder(whole)) for one in part.all() if kind.is_in(one.folder(whole))}
    if not manifests:
        return part.all()
    one = next(iter(manifests.values()))
    needed = [other for other in part.all() if other.rows(one["of"], one[block])]
    return [other for other in needed if not is_done(other.folder(whole), kind, is_here=is_here)]


def join(whole: Path, part: Part) -> None:
    """Joins the folders of the parts to that of the whole corpus, byte for byte as one job writes it. It continues after a kill.

    Raises:
        InputError: a part is missing, damaged, or by another model or of other texts than the first.
    """
    with outputs.in_turn(whole):
        if EMBEDDINGS.is_in(whole):
            return
        opened = []
        for one in part.all():
            if one.folder(whole).exists():
                opened.append((one.folder(whole), *open_embeddings(one.folder(whole))))
        plan = {name: value for name, value in opened[0][3].items() if name not in ("format", "rows", "of", "dim")}
        plan["num_texts"] = opened[0][3]["of"]
        for folder, *_, manifest in opened[1:]:
            EMBEDDINGS.require_same(folder, {**manifest, "num_texts": manifest["of"]}, plan)
        writer, first = EmbeddingWriter(whole, plan, {}), 0
        for _, _, found, _ in opened:
            for start in range(0, len(found), plan["texts_per_shard"]):
                if first + start >= writer.num_done:
                    writer.append(np.asarray(found[start : start + plan["texts_per_shard"]]))
            first += len(found)
        writer.finish(itertools.chain.from_iterable(ids for _, ids, _, _ in opened))


def finish(whole: Path, part: Part) -> list[Part]:
    """Joins the parts once all are there, and removes them; the parts that are missing, none where the whole is complete.

    Raises:
        InputError: as `join`.
    """
    look(whole)
    if missing := unfinished(whole, part):
        return missing
    with leases.in_turn(folder_of(whole)):
        fetch(whole)
        if missing := unfinished(whole, part, is_here=True):
            return missing
        join(whole, part)
        remove(whole)
    return []


def write_ranking(folder: Path, ranking: Ranking) -> None:
    """Keeps a ranking; the folder appears once it is complete."""
    with RANKING.writing(folder) as temporary:
        for name, array in (("doc_rows", ranking.doc_rows), ("scores", ranking.scores)):
            outputs.save_array(temporary / f"{name}.npy", np.asarray(array))
        num_queries, depth = np.shape(ranking.doc_rows)
        RANKING.write_manifest(temporary, {"num_queries": num_queries, "depth": depth})


def read_ranking(folder: Path) -> Ranking:
    """The ranking that `write_ranking` wrote, memory-mapped.

    Raises:
        InputError: the folder is absent or damaged.
    """
    manifest = RANKING.open(folder)
    shape = manifest["num_queries"], manifest["depth"]
    doc_rows, scores = (
        read_array(folder / f"{name}.npy", dtype, shape, rebuild=RANKING.mend)
        for name, dtype in (("doc_rows", "<i4"), ("scores", "<f4"))
    )
    return Ranking(doc_rows, scores)


def merged(rankings: Sequence[Ranking], order: Int[np.ndarray, " n"], depth: int) -> Ranking:
    """The ranking of all documents from those of the parts.

    Args:
        rankings: of the same queries, each [q, any]; of a document that is in several, the best score counts.
        order: all documents in the order in which equal scores stand, as `index.order_by_id` gives it.
        depth: k of the result.

    Example:
        >>> parts = [Ranking(np.array([[0, 1]]), np.array([[3.0, 1.0]])), Ranking(np.array([[2, -1]]), np.array([[1.0, -np.inf]]))]
        >>> merged(parts, np.array([2, 1, 0]), 2).doc_rows
        array([[0, 2]], dtype=int32)
    """
    place = np.append(np.empty(len(order), np.int64), len(order))  # -1, no document, stands last
    place[order] = np.arange(len(order))
    num_queries = len(rankings[0].doc_rows)
    found = Ranking(np.full((num_queries, depth), -1, np.int32), np.full((num_queries, depth), -np.inf, np.float32))
    for start in range(0, num_queries, _QUERIES):
        block = slice(start, start + _QUERIES)
        rows = np.concatenate([ranking.doc_rows[block] for ranking in rankings], axis=1)
        scores = np.concatenate([ranking.scores[block] for ranking in rankings], axis=1)
        by_score = np.lexsort((place[rows], -scores), axis=1)
        rows, scores = (np.take_along_axis(array, by_score, axis=1) for array in (rows, scores))
        for query, is_new in _first_times(rows):
            rows[query] = np.append(rows[query][is_new], np.full(np.count_nonzero(~is_new), -1))
            scores[query] = np.append(scores[query][is_new], np.full(np.count_nonzero(~is_new), -np.inf))
        kept = min(depth, rows.shape[1])
        found.doc_rows[block, :kept], found.scores[block, :kept] = rows[:, :kept], scores[:, :kept]
    return found


def remove(whole: Path) -> None:
    """Removes the parts once they are joined, and everybody sees the result."""
    mirrors.push_all()
    mirrors.clear(folder_of(whole), lambda name: not _PART_NAME.fullmatch(name))


def _first_times(rows: Int[np.ndarray, "q k"]) -> Iterator[tuple[int, np.ndarray]]:
    """The queries that have a document twice, and where each document stands for the first time."""
    in_order = np.sort(rows, axis=1)
    has_two = ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any(axis=1)
    for query in np.flatnonzero(has_two).tolist():
        is_new = np.zeros(rows.shape[1], bool)
        is_new[np.unique(rows[query], return_index=True)[1]] = True
        yield query, is_new
