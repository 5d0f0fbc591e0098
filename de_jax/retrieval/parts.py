"""A corpus in parts: independent jobs encode one each, in any order; the same call without a part joins them.

<folder>               of the whole corpus; complete once the parts are joined
<folder>.parts/0_of_4  one part: a folder of the same kind
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from de_jax.files import addresses, outputs
from de_jax.files.folders import Kind, clear
from de_jax.retrieval.embedding_files import EMBEDDINGS, EmbeddingWriter, open_embeddings
from de_jax.types import InputError

_PART_NAME = re.compile(r"(\d+)_of_(\d+)")


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
        """The part that a text such as "0/4" names. Raises InputError: another form, or a part that is not one of so many."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
        if not found or int(found[1]) >= int(found[2]):
            raise InputError(f"the shard is {text!r}; give its number from 0 and how many there are: 0/4, 1/4, 2/4 or 3/4.")
        return cls(int(found[1]), int(found[2]))

    def rows(self, num_texts: int, multiple: int) -> range:
        """The texts of this part: whole blocks of `multiple`, so that a block is encoded alike in a part and in the whole.

        The range is empty if there are more parts than blocks.
        """
        num_blocks = -(-num_texts // multiple)
        first, last = (num_blocks * number // self.total * multiple for number in (self.number, self.number + 1))
        return range(first, min(last, num_texts))

    def folder(self, whole: Path) -> Path:
        """The folder of this part, where what another machine finished of it in a bucket is fetched to."""
        folder = folder_of(whole) / f"{self.number}_of_{self.total}"
        if copies := addresses.wing(folder):
            copies.pull(folder.parent, asked=folder.name)
        return folder


def folder_of(whole: Path) -> Path:
    """The folder of the parts of a whole."""
    return whole.with_name(f"{whole.name}.parts")


def complete(whole: Path, kind: Kind, block: str) -> list[Path]:
    """The folders of all parts of a whole, in order; none where no part was begun."""
    folder = folder_of(whole)
    if copies := addresses.wing(folder):
        copies.pull(folder, everything=True)
    found = [match for path in folder.iterdir() if (match := _PART_NAME.fullmatch(path.name))] if folder.is_dir() else []
    if not found:
        return []
    if len(totals := {int(match[2]) for match in found}) > 1:
        raise InputError(f"{folder} holds shards of {' and of '.join(map(str, sorted(totals)))}; remove those of one split.")
    every = [Part(number, *totals) for number in range(*totals)]
    folders = {one: folder / f"{one.number}_of_{one.total}" for one in every}
    manifests = {one: kind.read_manifest(folders[one]) for one in every if kind.is_in(folders[one])}
    said = next(iter(manifests.values()), None)
    needed = [one for one in every if said is None or one.rows(said["of"], said[block])]
    if missing := [str(one) for one in needed if one not in manifests]:
        raise InputError(f"{folder} lacks the shards {', '.join(missing)}; run them, or remove this folder to begin in one job.")
    return [folders[one] for one in needed]


def join(whole: Path, firsts_of: Callable[[], np.ndarray]) -> None:
    """Joins the embeddings of all parts, if there are parts, byte for byte as one job writes them. It continues after a kill."""
    if EMBEDDINGS.is_in(whole):
        remove(whole)
    if not (opened := [(folder, *open_embeddings(folder)) for folder in complete(whole, EMBEDDINGS, "texts_per_shard")]):
        return
    with outputs.in_turn(whole):
        plan = {name: value for name, value in opened[0][3].items() if name not in ("format", "rows", "of", "dim")}
        plan["num_texts"] = opened[0][3]["of"]
        for folder, *_, manifest in opened[1:]:
            EMBEDDINGS.require_same(folder, {**manifest, "num_texts": manifest["of"]}, plan)
        writer, first, firsts = EmbeddingWriter(whole, plan, {}), 0, firsts_of()
        for _, _, found, _ in opened:
            for start in range(0, len(found), plan["texts_per_shard"]):
                if first + start >= writer.num_done:
                    block = np.array(found[start : start + plan["texts_per_shard"]])
                    own = firsts[first + start : first + start + len(block)]
                    if (before := np.flatnonzero(own < first)).size:  # of texts that another job encoded
                        block[before] = writer.written()[own[before]]
                    writer.append(block)
            first += len(found)
        writer.finish(itertools.chain.from_iterable(ids for _, ids, _, _ in opened))
    remove(whole)


def remove(whole: Path) -> None:
    """Removes the parts of a whole that is complete, here and in a bucket, once the bucket has the whole."""
    folder = folder_of(whole)
    if folder.is_dir() or addresses.address_of(folder):
        addresses.upload()
        if copies := addresses.wing(folder):
            copies.remove_below(folder, _PART_NAME)
        clear(folder, lambda name: not _PART_NAME.fullmatch(name))
