"""The words of a text in any script, for BM25 and for finding near copies."""

from __future__ import annotations

import functools
import re
import unicodedata

HAN = "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
UNSPACED = f"{HAN}\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\uac00-\ud7a3"
"""Chinese and Japanese; and Thai, Lao, Burmese, Khmer, and Korean, where endings join words."""
_WORD, _RUN, _GAP = re.compile(r"\w+"), re.compile(f"[{UNSPACED}]+"), re.compile(rf"(?<=[{HAN}])\s+(?=[{HAN}])")


def words(text: str) -> list[str]:
    """Runs of letters, digits and their marks, in lower case and one Unicode form; of unspaced scripts pairs of characters.

    Pairs overlap, as in Lucene's analyzer for Chinese, Japanese and Korean. Blanks between two characters of Chinese or Japanese
    do not count: a line ends there, or a vocabulary has cut there.

    Example:
        >>> words("A Noun, NOUNS"), words("東京の人口")
        (['a', 'noun', 'nouns'], ['東京', '京の', 'の人', '人口'])
    """
    text = unicodedata.normalize("NFKC", text).lower()
    if text.isascii():
        return _WORD.findall(text)
    return _marked_word().findall(_RUN.sub(_pairs, _GAP.sub("", text.replace("i\u0307", "i"))))  # of the Turkish capital


def is_long(word: str) -> bool:
    """Whether BM25 counts a word: it has two characters, or is of an unspaced script."""
    return len(word) > 1 or _RUN.match(word) is not None


def _pairs(run: re.Match[str]) -> str:
    """The overlapping pairs of a run, between blanks; a character alone stays."""
    return f" {' '.join(run[0][place : place + 2] for place in range(max(1, len(run[0]) - 1)))} "


@functools.cache
def _marked_word() -> re.Pattern[str]:
    """The pattern of a word; for `re`, vowel signs of Hindi and points of Arabic are no part of one."""
    marks = "".join(one for one in map(chr, range(0x300, 0x20000)) if unicodedata.category(one).startswith("M"))
    return re.compile(rf"\w+(?:[{marks}]+\w*)*")
