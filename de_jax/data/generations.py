"""Generations of hard negatives: what a miner writes, and what others read.

<negatives_dir>/000003/
    part-00000.jsonl    one training pair a line: {"query_id", "doc_id", "neg_doc_ids": [...], "neg_query_ids": [...]}
    manifest.json       what they were mined from and with, and the checksum of every part; written last

A generation appears by one rename and is never changed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.data import files
from de_jax.data.reading import read_lines
from de_jax.types import InputError

FORMAT = "de_jax negatives 1"
LINES_PER_PART = 100_000
_DIGITS = 6


class Mined(NamedTuple):
    """The hard negatives of one training pair, best first; all are ids."""

    query_id: str
    doc_id: str
    neg_doc_ids: list[str]
    neg_query_ids: list[str]


class Generation(NamedTuple):
    """A complete generation; `manifest` holds what the miner says of it."""

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
    """Writes a generation; it is not there until it is whole.

    Args:
        negatives_dir: of all generations.
        number: of this one; higher than those that are there.
        mined: one for each training pair, at least one.
        facts: for the manifest: "docs" and "queries" (content hashes of the texts) and what else the miner wants to say.

    Raises:
        InputError: nothing was mined, or that generation is there already.
    """
    folder = generation_dir(negatives_dir, number)
    if folder.exists():
        raise InputError(f"{folder} is there already; one miner writes to a folder at a time.")
    lines, num_pairs = iter(mined), 0
    parts: dict[str, str] = {}
    with files.atomic_dir(folder) as temporary:
        while chunk := list(itertools.islice(lines, lines_per_part)):
            part = temporary / f"part-{len(parts):05d}.jsonl"
            part.write_text("".join(json.dumps(line._asdict(), ensure_ascii=False) + "\n" for line in chunk), encoding="utf-8")
            parts[part.name] = files.sha256_of(part)
            num_pairs += len(chunk)
        if not num_pairs:
            raise InputError(f"there are no pairs to write to {folder}; mine for at least one.")
        manifest = {"format": FORMAT, "generation": number, "num_pairs": num_pairs, "parts": parts, **facts}
        files.write_json(temporary / "manifest.json", manifest)
    return Generation(number, folder, manifest)


def generation_dir(negatives_dir: str | Path, number: int) -> Path:
    """Where a generation is, or will be."""
    return Path(negatives_dir) / f"{number:0{_DIGITS}d}"


def numbers(negatives_dir: str | Path) -> list[int]:
    """The generations that claim to be complete, oldest first."""
    folder = Path(negatives_dir)
    there = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in there if path.name.isdigit() and (path / "manifest.json").is_file())


def open_generation(negatives_dir: str | Path, number: int) -> Generation:
    """A generation whose every part has the checksum that its manifest gives.

    Raises:
        InputError: it is absent, of another format, half-copied or damaged.
    """
    folder, manifest = generation_dir(negatives_dir, number), read_manifest(negatives_dir, number)
    for name, checksum in manifest["parts"].items():
        part = folder / Path(name).name
        if not part.is_file() or files.sha256_of(part) != checksum:
            raise InputError(f"{part} is missing, half-copied or damaged; copy the generation again, or remove it.")
    return Generation(number, folder, manifest)


def read_manifest(negatives_dir: str | Path, number: int) -> dict[str, Any]:
    """What the miner says of a generation; its parts are not looked at.

    Raises:
        InputError: it is absent or of another format.
    """
    folder = generation_dir(negatives_dir, number)
    manifest = files.read_json(folder / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not isinstance(manifest.get("parts"), dict):
        raise InputError(f"{folder} is not in the format '{FORMAT}'; mine it again.")
    return manifest


def read_mined(generation: Generation) -> Iterator[Mined]:
    """The lines of a generation, in order."""
    for name in sorted(generation.manifest["parts"]):
        path = generation.folder / Path(name).name
        for line, raw in read_lines(path):
            try:
                mined = Mined(**json.loads(raw))
            except (ValueError, TypeError):
                raise InputError(f"{path}, line {line}: expected an object with {', '.join(Mined._fields)}.") from None
            yield mined
