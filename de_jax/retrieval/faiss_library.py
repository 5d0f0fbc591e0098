"""FAISS itself, imported when needed; its complaints as sentences, and copies of its indexes on GPUs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from de_jax.types import InputError


def faiss() -> Any:
    """The package.

    Raises:
        InputError: it cannot be imported.
    """
    try:
        import faiss as library
    except ImportError as error:
        raise InputError(
            f"FAISS cannot be imported ({error}); pip install 'de_jax[cpu]', or 'de_jax[gpu]' for NVIDIA GPUs, never both."
        ) from None
    return library


def on_gpus(index: Any, *, all_gpus: bool = False, is_sharded: bool = True, float16: bool = False) -> Any:
    """The copy of an index on the first GPU or on all of them.

    Raises:
        InputError: FAISS has no such index on GPUs, or it does not fit.
    """
    cloner = faiss().GpuMultipleClonerOptions()
    cloner.shard, cloner.useFloat16 = is_sharded, float16
    with sentence("FAISS cannot put the index on a GPU", "choose Flat or an IVF index that fits there, or search on the CPU"):
        return faiss().index_cpu_to_gpus_list(index, cloner, gpus=None if all_gpus else [0])


@contextlib.contextmanager
def sentence(what: str, fix: str) -> Iterator[None]:
    """Turns FAISS's complaint, which names lines of its C++, into one sentence."""
    try:
        yield
    except RuntimeError as error:
        complaint = " ".join(re.split(r"\.\w+:\d+: ", str(error))[-1].split())
        match = re.fullmatch(r"Error: '(.*?)' failed(?:: (.*))?", complaint)
        reason = (match[2] or match[1]) if match else complaint
        raise InputError(f"{what} ({reason.rstrip('.')}); {fix}.") from None
