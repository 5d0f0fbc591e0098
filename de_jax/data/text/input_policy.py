"""What every command does with empty texts, and with documents that have the id of their query.

Empty texts are refused, or left out with `--skip_empty`: then nothing is trained on them, and a judged one counts as not found.
A document with the id of its query is that query (ArguAna, Quora), so rankings leave it out; `--keep_identical_ids` is for ids that
are equal by chance. Whatever was left out, and whatever training cuts off, is counted on stderr.
"""

import re
import unicodedata
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from de_jax.files import outputs

_BLANK = ("Cc", "Cf", "Zl", "Zp", "Zs")
_IGNORED = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Marks and letters that show nothing: joiners, fillers of Hangul, selectors of variants, the empty pattern of Braille."""


def shown(text: str) -> str:
    """The text without blanks at its ends; "" if it has only characters that show nothing: blank, zero-width or of control."""
    text = text.strip()
    return text if any(unicodedata.category(one) not in _BLANK and not _IGNORED.match(one) for one in text) else ""


def tell_skipped(texts_file: str | Path, text_ids: Collection[str]) -> None:
    """Counts the empty texts of a file, which are left out."""
    if text_ids:
        outputs.tell(f"{texts_file}: empty texts left out: {len(text_ids)} ({examples(text_ids)}).")


def tell_unused(num_pairs: int) -> None:
    """Counts relevant pairs that are left out of training with one of their texts."""
    if num_pairs:
        outputs.tell(f"relevant pairs left out, as their query or document is an empty text: {num_pairs}.")


def tell_graded(name: str, number: int) -> None:
    """Counts judged pairs whose grade leaves them out of training."""
    if number:
        outputs.tell(f"{name}: pairs of relevance 0 or below, which are no training pairs: {number}.")


def tell_cut(name: str, kind: str, lengths: np.ndarray, setting: str, max_length: int) -> None:
    """Counts texts that are longer than the setting."""
    share = float(np.mean(lengths > max_length))
    most = int(np.quantile(lengths, 0.99, method="higher"))
    outputs.tell(
        f"{name}: {100 * share:.0f} % of the {kind} have more than {setting} = {max_length} tokens and are cut at "
        f"their end; 99 % have at most {most}."
    )


def tell_identical(name: str, qrels: Mapping[str, Mapping[str, int]]) -> None:
    """Counts judgements of documents that rankings leave out for their ids."""
    dropped = [query_id for query_id, judged in qrels.items() if judged.get(query_id, 0) > 0]
    if dropped:
        outputs.tell(
            f"{name}: judgements dropped, as the document has the id of its query: {len(dropped)} ({examples(dropped)}); "
            "such documents count as not found; keep_identical_ids ranks them."
        )


def examples(text_ids: Collection[str]) -> str:
    """The first three ids."""
    first = [text_id for _, text_id in zip(range(3), text_ids, strict=False)]
    return ", ".join(first) + (", ..." if len(text_ids) > 3 else "")
