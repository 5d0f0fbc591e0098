"""Described GPUs to compile for: JAX's CUDA plugin compiles without a GPU, its driver or CUDA's libraries.

XLA then has a description of a GPU. Nothing is tuned on a device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import Any, NamedTuple

import jax

from de_jax.types import DISTRIBUTION, InputError

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
DEFAULT_SHARE = 0.75
"""Of a GPU's memory, which JAX takes where --memory_fraction does not say otherwise."""


class Gpu(NamedTuple):
    """One GPU on an SXM board, by NVIDIA's data sheets and XLA's own descriptions (xla/backends/gpu/target_config)."""

    name: str
    capability: int  # major version of the compute capability
    num_cores: int  # streaming multiprocessors
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_second: int
    l2_bytes: int
    shared_bytes_per_core: int
    peak_flops: float  # per second, bfloat16, dense
    link_bytes: float  # per second that its NVLinks can receive: half of the bidirectional figure

    @property
    def description(self) -> str:
        """The target of XLA, its GpuTargetConfigProto as text."""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_bytes_per_core}
  shared_memory_per_block_optin: {self.shared_bytes_per_core - 1024}
  threads_per_core_limit: 2048
  core_count: {self.num_cores}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bytes_per_second}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {self.capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


A100 = Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 85100068864, 2039 * 10**9, 40 << 20, 164 << 10, 312e12, 300e9)
H100 = Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 84942979072, 3352 * 10**9, 50 << 20, 228 << 10, 989e12, 450e9)
H200 = H100._replace(name="NVIDIA H200 141GB HBM3e", memory_bytes=151397597184, memory_bytes_per_second=4800 * 10**9)
GPUS = {"a100": A100, "h100": H100, "h200": H200}


def devices(gpu: Gpu, num_hosts: int, num_per_host: int) -> list[Any]:
    """GPUs that a program can be compiled for, and not run on.

    Raises:
        InputError: JAX's CUDA plugin is not installed, or cannot compile for an absent GPU.
    """
    if not is_installed():
        raise InputError(
            f"compiling for a GPU needs JAX's CUDA plugin; run pip install '{DISTRIBUTION}[plan_gpu]', which needs no GPU."
        )
    from jax.experimental import topologies

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # else the plugin reports a missing driver many times
    shape = f"1x{num_hosts}x{num_per_host}"  # slices, hosts, GPUs of a host
    try:
        return list(topologies.get_topology_desc(platform="cuda", target_config=gpu.description, topology=shape).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"JAX {jax.__version__}'s CUDA plugin does not compile without a GPU: {reason}.") from error


def is_installed() -> bool:
    """Whether one of JAX's CUDA plugins is."""
    with contextlib.suppress(ModuleNotFoundError):  # `jax_plugins` itself is absent
        return any(importlib.util.find_spec(module) for module in PLUGINS)
    return False
