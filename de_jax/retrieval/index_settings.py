"""Which index searches, and how: settings that commands, miners and evaluations share. It imports no JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from de_jax.settings import PositiveInt, check_fields

Device = Literal["cpu", "gpu", "all_gpus"]
GPUMode = Literal["shard", "replicate"]


@dataclass(frozen=True)
class IndexSettings:
    """The index.

    Attributes:
        index: exact (default), a FAISS factory string such as IVF1024,Flat, or milvus:URI.
        nprobe: inverted lists to visit in an IVF index (default that of a saved index, or a sixteenth).
        ef_search: candidates to keep in an HNSW index.
        faiss_device: device on which FAISS fills and searches.
        faiss_gpu_mode: use of several GPUs: a shard each, or copies.
        faiss_float16: the GPU stores vectors in half precision.
        faiss_on_disk: keep the lists of an IVF index in a file, for corpora beyond memory.
    """

    index: str = "exact"
    nprobe: PositiveInt | None = None
    ef_search: PositiveInt | None = None
    faiss_device: Device = "cpu"
    faiss_gpu_mode: GPUMode = "shard"
    faiss_float16: bool = False
    faiss_on_disk: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def alone(self) -> IndexSettings:
        """These settings without those of a subclass."""
        return IndexSettings(**{one.name: getattr(self, one.name) for one in dataclasses.fields(IndexSettings)})
