"""Generations of hard negatives: the files that a miner writes and a trainer reads.

<negatives_dir>/000003/
    pairs.npy         int32 [P, 2]       the training pairs: (query, document)
    neg_docs.npy      int32 [P, N]       documents; -1 fills up
    neg_queries.npy   int32 [P, M]       queries; -1 fills up
    scores.npy        float32 [P, 1 + N] by the miner, of the pair's document and its neg_docs; NaN if unknown; an optional file
    query_ids.npy     bytes [q]          UTF-8: the ids of the texts that the numbers above stand for
    doc_ids.npy       bytes [n]
    manifest.json     the texts and the model they were mined with, and the checksum of every file; written last

A generation appears by one rename and is never changed.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.data.negatives.mined_pairs import Mined, MinedPairs, of_lines
from de_jax.files import folders, outputs, schema
from de_jax.files.kind import Kind
from de_jax.files.reading import parse_json, read_array
from de_jax.types import PADDING_ID, InputError

_DIGITS = 6
_DTYPES = {"pairs": "<i4", "neg_docs": "<i4", "neg_queries": "<i4", "scores": "<f4", "query_ids": "S", "doc_ids": "S"}


class DamagedGeneration(InputError):
    """A generation that is absent, half-copied or damaged, or that holds what no miner writes; another one may be whole."""


NEGATIVES = Kind(
    "negatives",
    {
        "num_pairs": schema.integer(1),
        "parts": schema.map_of(schema.text, keys=schema.file_name, least=1),
        "checkpoint_step": schema.Maybe(schema.integer()),
        "run_dir_from_here": schema.Maybe(schema.text),
        "statistics": schema.Maybe(schema.map_of(schema.number())),
        "seconds": schema.Maybe(schema.map_of(schema.number(0))),
    },
    make="copy the generation again, or remove it",
    mend="copy the generation again, or remove it",
    version=2,
)


class Generation(NamedTuple):
    """A complete generation; `manifest` holds the miner's facts."""

    number: int
    folder: Path
    manifest: Mapping[str, Any]


def write_generation(negatives_dir: str | Path, number: int, mined: MinedPairs, facts: Mapping[str, Any]) -> Generation:
    """Writes a generation; it appears when it is complete.

    Args:
        negatives_dir: of all generations.
        number: of this generation; higher than the existing numbers.
        mined: at least one pair.
        facts: for the manifest: "docs" and "queries" (content hashes of the texts) and what else the miner wants to say.

    Raises:
        InputError: nothing was mined, or the generation exists already.
    """
    folder = generation_dir(negatives_dir, number)
    if folder.exists():
        raise InputError(f"{folder} exists already; one miner writes to a folder at a time.")
    if not len(mined.pairs):
        raise InputError(f"there are no pairs to write to {folder}; mine for at least one.")
    arrays = {f"{name}.npy": array for name, array in mined._asdict().items() if array is not None}
    with folders.atomic_dir(folder) as temporary:
        for name, array in arrays.items():
            outputs.save_array(temporary / name, array)
        parts = {name: outputs.sha256_of(temporary / name) for name in arrays}
        entries = {"generation": number, "num_pairs": len(mined.pairs), "parts": parts, **facts}
        manifest = NEGATIVES.write_manifest(temporary, entries)
    return Generation(number, folder, manifest)


def write_lines(negatives_dir: str | Path, number: int, lines: Iterable[Mined], facts: Mapping[str, Any]) -> Generation:
    """`write_generation` of lines of ids."""
    return write_generation(negatives_dir, number, of_lines(lines), facts)


def generation_dir(negatives_dir: str | Path, number: int) -> Path:
    """Where a generation is, or will be."""
    return Path(negatives_dir) / _name(number)


def numbers(negatives_dir: str | Path) -> list[int]:
    """The generations that claim to be complete, oldest first."""
    return [number for number in _named(negatives_dir) if NEGATIVES.is_in(generation_dir(negatives_dir, number))]


def next_number(negatives_dir: str | Path) -> int:
    """The number of the next generation, beyond every folder there is, complete or not."""
    return max(_named(negatives_dir), default=0) + 1


def open_generation(negatives_dir: str | Path, number: int) -> Generation:
    """A generation whose every part has the checksum that its manifest gives.

    Raises:
        DamagedGeneration: it is absent, of another format, half-copied or damaged.
    """
    folder = generation_dir(negatives_dir, number)
    with _damage():
        return Generation(number, folder, NEGATIVES.open(folder))


def open_newest(folder: str | Path) -> Generation:
    """The generation in a folder, or the newest whole one where it is a folder of generations; warns of newer ones.

    Raises:
        InputError: none is there, or none is whole.
    """
    folder = Path(folder).absolute()
    there = numbers(folder)
    if not there and folder.is_dir() and (number := _number(folder.name)) is not None:
        return open_generation(folder.parent, number)
    if not there:
        raise InputError(
            f"{folder} is not a generation of negatives and contains no generation; make one with de-jax mine_negatives."
        )
    for number in reversed(there):
        try:
            return open_generation(folder, number)
        except DamagedGeneration as error:
            if number == there[0]:
                raise
            warnings.warn(f"generation {number} of the negatives is skipped: {error}", stacklevel=2)
    raise AssertionError("the loop returns or raises")


def read_manifest(negatives_dir: str | Path, number: int) -> dict[str, Any]:
    """The miner's facts about a generation; its parts are not read.

    Raises:
        DamagedGeneration: it is absent, of another format, or says what no miner says.
    """
    with _damage():
        folder = generation_dir(negatives_dir, number)
        return NEGATIVES.read_manifest(folder)


def read(generation: Generation) -> MinedPairs:
    """The arrays of a generation, memory-mapped.

    Raises:
        DamagedGeneration: a file that is missing, or whose content is not a miner's.
    """
    num_pairs, mend = generation.manifest["num_pairs"], NEGATIVES.mend
    shapes: dict[str, tuple[int | None, ...]] = {"pairs": (num_pairs, 2), "query_ids": (None,), "doc_ids": (None,)}
    with _damage():
        arrays: dict[str, Any] = {
            name: read_array(generation.folder / f"{name}.npy", dtype, shapes.get(name, (num_pairs, None)), rebuild=mend)
            for name, dtype in _DTYPES.items()
            if name != "scores" or "scores.npy" in generation.manifest["parts"]
        }
        mined = MinedPairs(**{"scores": None, **arrays})
        queries, docs = len(mined.query_ids), len(mined.doc_ids)
        for name, rows, least, size in (
            ("pairs", mined.pairs[:, 0], 0, queries),
            ("pairs", mined.pairs[:, 1], 0, docs),
            ("neg_docs", mined.neg_docs, PADDING_ID, docs),
            ("neg_queries", mined.neg_queries, PADDING_ID, queries),
        ):
            if rows.min(initial=least) < least or rows.max(initial=least) >= size:
                raise InputError(f"{generation.folder / name}.npy is damaged: it refers to a text that it does not hold; {mend}.")
    return mined


def read_mined(generation: Generation) -> Iterator[Mined]:
    """The pairs of a generation by id, in order; raises what `read` raises."""
    return read(generation).lines()


def parsed(raw: str, where: str) -> Mined:
    """One line; a missing list is empty. DamagedGeneration for a malformed line, with its place, `where`."""
    try:
        record = parse_json(raw)
        mined = Mined(record["query_id"], record["doc_id"], record.get("neg_doc_ids", []), record.get("neg_query_ids", []))
        if not all(map(_is_id, mined[:2])) or not all(isinstance(ids, list) and all(map(_is_id, ids)) for ids in mined[2:]):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedGeneration(
            f"{where}: expected an object with {', '.join(Mined._fields)}; the first two are strings, the others lists of strings."
        ) from None
    return mined


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Errors while a generation is read count as its damage: another generation may be complete."""
    try:
        yield
    except (InputError, OSError) as error:
        raise DamagedGeneration(str(error)) from None


def _named(negatives_dir: str | Path) -> list[int]:
    """The numbers of all folders that have a generation's name, in order."""
    folder = Path(negatives_dir)
    found = map(_number, (path.name for path in folder.iterdir())) if folder.is_dir() else ()
    return sorted(number for number in found if number is not None)


def _number(name: str) -> int | None:
    """The number of the generation that a folder of this name is; None for other names."""
    return int(name) if re.fullmatch(f"[0-9]{{{_DIGITS},18}}", name) and name == _name(int(name)) else None


def _name(number: int) -> str:
    return f"{number:0{_DIGITS}d}"


def _is_id(value: Any) -> bool:
    """Whether a store may know a text by this; half of a surrogate pair cannot be written."""
    return isinstance(value, str) and bool(value) and not re.search("[\t\n\r\0\ud800-\udfff]", value)
