"""Progress bars on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

SECONDS_IN_FILES = 10.0
"""Between two states of a bar where stderr is no terminal: a file keeps every one of them."""


def progress_bar(iterable: Iterable[Any] | None = None, **options: Any) -> Any:
    """A tqdm bar; `options` are tqdm's."""
    from tqdm import tqdm

    return tqdm(iterable, mininterval=0.1 if sys.stderr.isatty() else SECONDS_IN_FILES, **options)
