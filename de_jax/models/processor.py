"""The kind of device that this process computes on, and the precision in which it multiplies fastest."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import jax

from de_jax.models import layers
from de_jax.types import Params

Family = Literal["amx", "avx512_bf16", "other_cpu", "gpu", "old_gpu", "tpu"]
"""CPUs by their units for bfloat16, Intel's matrix units or vectors; GPUs from NVIDIA's compute capability 8 on, and others."""
Dtype = Literal["float32", "bfloat16"]
WITH_BFLOAT16: tuple[Family, ...] = ("amx", "avx512_bf16", "gpu", "tpu")
"""Where products in bfloat16 take less time than in float32; measured for avx512_bf16 alone (docs/results/speed.md)."""
_UNITS: dict[str, Family] = {"amx_bf16": "amx", "avx512_bf16": "avx512_bf16"}
"""Linux's names of a processor's units, the faster first."""


@functools.cache
def family() -> Family:
    """The family of this process's devices."""
    platform = jax.local_devices()[0].platform
    if platform == "tpu":
        return "tpu"
    if platform == "gpu":
        return "gpu" if layers.has_bfloat16_units() else "old_gpu"
    units = _units()
    return next((family for name, family in _UNITS.items() if name in units), "other_cpu")


def fast_dtype() -> Dtype:
    """The meaning of dtype="auto" for encoding: bfloat16 where the devices multiply it natively, else float32."""
    return "bfloat16" if family() in WITH_BFLOAT16 else "float32"


def _units() -> set[str]:
    """The flags of the first processor in Linux's list; none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def rounded_kernels(params: Params, dtype: str) -> Params:
    """The parameters with their kernels in the precision that they are multiplied in, so that no step need round them again."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf.astype(dtype) if path[-1].key == "kernel" else leaf, params)
