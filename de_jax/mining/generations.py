"""Generations of hard negatives: the files that a miner writes and a trainer reads.

<negatives_dir>/000003/
    part-00000.jsonl    one training pair a line: {"query_id", "doc_id", "neg_doc_ids": [...], "neg_query_ids": [...]}
    manifest.json       the texts and the model they were mined with, and the checksum of every part; written last

A generation appears by one rename and is never changed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.files import folders, outputs, schema
from de_jax.files.kind import Kind
from de_jax.files.reading import parse_json, read_lines
from de_jax.types import InputError

LINES_PER_PART = 100_000
_DIGITS = 6


class DamagedGeneration(InputError):
    """A generation that is absent, half-copied or damaged, or that holds what no miner writes; another one may be whole."""


class Mined(NamedTuple):
    """The hard negatives of one training pair; all are ids."""

    query_id: str
    doc_id: str
    neg_doc_ids: list[str]
    neg_query_ids: list[str]


NEGATIVES = Kind(
    "negatives",
    {
        "num_pairs": schema.integer(),
        "parts": schema.map_of(schema.text, keys=schema.file_name, least=1),
        "checkpoint_step": schema.Maybe(schema.integer()),
        "statistics": schema.Maybe(schema.map_of(schema.number())),
        "seconds": schema.Maybe(schema.map_of(schema.number(0))),
    },
    make="copy the generation again, or remove it",
    mend="copy the generation again, or remove it",
)


class Generation(NamedTuple):
    """A complete generation; `manifest` holds the miner's facts."""

    number: int
    folder: Path
    manifest: Mapping[str, Any]


def write_generation(
    negatives_dir: str | Path,
    number: int,
    mined: Iterable[Mined],
    facts: Mapping[str, Any],
    *,
    lines_per_part: int = LINES_PER_PART,
) -> Generation:
    """Writes a generation; it appears when it is complete.

    Args:
        negatives_dir: of all generations.
        number: of this generation; higher than the existing numbers.
        mined: one for each training pair, at least one.
        facts: for the manifest: "docs" and "queries" (content hashes of the texts) and what else the miner wants to say.

    Raises:
        InputError: nothing was mined, or the generation exists already.
    """
    folder = generation_dir(negatives_dir, number)
    if folder.exists():
        raise InputError(f"{folder} exists already; one miner writes to a folder at a time.")
    lines, num_pairs = iter(mined), 0
    parts: dict[str, str] = {}
    with folders.atomic_dir(folder) as temporary:
        while chunk := list(itertools.islice(lines, lines_per_part)):
            part = temporary / f"part-{len(parts):05d}.jsonl"
            part.write_text("".join(json.dumps(line._asdict(), ensure_ascii=False) + "\n" for line in chunk), encoding="utf-8")
            parts[part.name] = outputs.sha256_of(part)
            num_pairs += len(chunk)
        if not num_pairs:
            raise InputError(f"there are no pairs to write to {folder}; mine for at least one.")
        entries = {"generation": number, "num_pairs": num_pairs, "parts": parts, **facts}
        manifest = NEGATIVES.write_manifest(temporary, entries)
    return Generation(number, folder, manifest)


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
        return NEGATIVES.read_manifest(generation_dir(negatives_dir, number))


def read_mined(generation: Generation) -> Iterator[Mined]:
    """The lines of a generation, in order.

    Raises:
        DamagedGeneration: a malformed line, fewer or more pairs than the manifest counts, or a part that is gone.
    """
    num_pairs = 0
    for name in sorted(generation.manifest["parts"]):
        path = generation.folder / name
        with _damage():
            for line, raw in read_lines(path):
                yield parsed(raw, f"{path}, line {line}")
                num_pairs += 1
    if num_pairs != generation.manifest["num_pairs"]:
        raise DamagedGeneration(
            f"{generation.folder} holds {num_pairs} pairs, but its manifest says {generation.manifest['num_pairs']}; copy it again."
        )


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
