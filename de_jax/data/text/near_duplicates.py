"""Near-duplicate texts by MinHash: which texts to keep so that no two kept ones share most of their three-word sequences.

Shingling and banding follow "On the resemblance and containment of documents" (Broder 1997). Ours: candidates are checked by
their exact resemblance, so the hashing can only miss a pair, never drop a text wrongly.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import numpy as np
from jaxtyping import Int, UInt64

SHINGLE_WORDS = 3
_NUM_BANDS, _BAND_ROWS = 16, 4

_WORD = re.compile(r"\w+")
_WEIGHTS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
_MULTIPLIERS = np.random.default_rng(0).integers(0, 2**63, _NUM_BANDS * _BAND_ROWS, dtype=np.uint64) * 2 + 1


def shingles(text: str) -> UInt64[np.ndarray, " s"]:
    """The distinct three-word sequences of a text, hashed, in ascending order; case and punctuation do not count."""
    return _shingles(np.array([_hash_word(word) for word in _WORD.findall(text.lower())], dtype=np.uint64))


def shingles_of(token_ids: Int[np.ndarray, " t"]) -> frozenset[int]:
    """The distinct three-token sequences of a text, hashed."""
    return frozenset(_shingles(np.asarray(token_ids).astype(np.uint64)).tolist())


def _shingles(words: UInt64[np.ndarray, " w"]) -> UInt64[np.ndarray, " s"]:
    padded = np.pad(words, (0, max(SHINGLE_WORDS - len(words), 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, SHINGLE_WORDS)  # [s, 3]
    return np.unique(_mix((windows * _WEIGHTS[None, :]).sum(axis=1, dtype=np.uint64)))


def keep(shingle_sets: Iterable[np.ndarray], *, max_resemblance: float) -> list[int]:
    """The positions of the texts to keep, going from the first to the last.

    A text is dropped when the shingles it shares with a kept text are more than `max_resemblance` of the two texts' shingles
    together (Jaccard). A pair at .7 is found with a probability of .99, one at .6 with .89.

    Args:
        shingle_sets: of each text, from `shingles`.
        max_resemblance: 0 to 1.
    """
    kept: list[int] = []
    buckets: dict[tuple[int, int], list[set[int]]] = {}
    for position, hashed in enumerate(shingle_sets):
        mine = set(hashed.tolist())
        keys = list(enumerate(_bands(hashed).tolist()))
        candidates = {id(other): other for key in keys for other in buckets.get(key, ())}.values()
        if any(resemblance(mine, other) > max_resemblance for other in candidates):
            continue
        kept.append(position)
        for key in keys:
            buckets.setdefault(key, []).append(mine)
    return kept


def resemblance(first: AbstractSet[int], second: AbstractSet[int]) -> float:
    """Jaccard's: shared shingles among all of two texts."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


def _bands(hashed: np.ndarray) -> np.ndarray:
    """[16] one key per band of the MinHash signature; texts that agree in a band are candidates."""
    permuted = _mix(hashed[:, None] * _MULTIPLIERS[None, :])  # [s, 64]
    signature = permuted.min(axis=0).reshape(_NUM_BANDS, _BAND_ROWS)
    keys = signature[:, 0]
    for row in range(1, _BAND_ROWS):
        keys = _mix(keys) + signature[:, row]
    return keys


def _mix(values: np.ndarray) -> np.ndarray:
    """Spreads every bit of a 64-bit value over all of them."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return values ^ (values >> np.uint64(29))


@functools.lru_cache(maxsize=1 << 18)
def _hash_word(word: str) -> int:
    # Not hash(): its values change from process to process.
    return zlib.crc32(word.encode()) | 1 << 32
