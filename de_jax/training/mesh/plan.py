"""Plans of a training step on remote devices: compiled ahead of time, never run."""

import contextlib
import importlib.util
import math
import os
import re
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from de_jax.models import attention, layers
from de_jax.settings import needs
from de_jax.training.mesh import hlo
from de_jax.types import DISTRIBUTION, InputError

GIB = 2**30


class Chip(NamedTuple):
    """One TPU chip, as docs.cloud.google.com/tpu/docs/<name> has it, or one GPU."""

    peak_flops: float  # per second, bfloat16
    link_bytes: float  # per second that all its links together can receive: half of the bidirectional figure
    memory_bytes: int  # the compiler's limit for a program; of a GPU, the share that JAX takes by default
    config: str | None = None  # the compiler's, where by default a chip is more than one device


PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
GPU_SHARE = 0.75
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
CHIPS = {
    "v4": Chip(275e12, 300e9, int(30.75 * GIB), "megacore"),  # six links of 50 GB/s (Jouppi et al. 2023)
    "v5e": Chip(197e12, 200e9, int(15.75 * GIB)),
    "v5p": Chip(459e12, 600e9, int(95.74 * GIB)),
    "v6e": Chip(918e12, 400e9, int(31.25 * GIB)),
}
SIMULATED = "cpu"
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # else it asks Google Cloud what machine this is; the next two are the answer, and of no effect
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else one process a machine, as suits real chips
}
EFFORT_LEVELS = (9, 19, 29, 39)
"""O0 to O3 as XLA numbers them (`jax.CompilerEffortLevel`)."""
EXAMPLES = "v4:4x4x4, v5e:2x2, v5e:8x8, v6e:16x16, v5p:4x4x4, h100:8, a100:4x8, cpu:8"


class Topology(NamedTuple):
    """Devices to compile for; they may be remote or simulated."""

    name: str
    devices: list[Any]
    chip: Chip | None  # None if the devices are simulated


class Memory(NamedTuple):
    """Bytes on each device, by the compiler. A donated argument and the output in its place are `aliased`, one memory."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    program: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.program


class Plan(NamedTuple):
    """A compiled step. If it does not fit, `why_not` is the compiler's sentence, and the others but `compile_seconds` are empty."""

    memory: Memory | None
    costs: hlo.Costs | None
    why_not: str | None
    compile_seconds: float
    attention: tuple[str, ...] = ()  # "fused" and "plain", whichever the step has


class Estimate(NamedTuple):
    """Seconds that a step takes at least: every product at the chip's peak, every link full, both at the same time."""

    compute_seconds: float
    collective_seconds: float


def open_topology(name: str) -> Topology:
    """The devices that a name such as "v5e:16x16", "h100:8" (GPUs), "h100:2x8" (hosts and their GPUs) or "cpu:8" stands for.

    Simulated ones are to be opened before JAX has looked for devices.

    Raises:
        InputError: an unknown name or shape, or libtpu or the CUDA plugin is not installed.
    """
    kind, _, shape = name.partition(":")
    if kind == SIMULATED and shape.isdigit() and int(shape):
        return Topology(name, _simulated(int(shape)), None)
    if kind in GPUS and re.fullmatch(r"([1-9]\d*x)?[1-9]\d*", shape):
        num_hosts, num_per_host = map(int, shape.rpartition("x")[::2]) if "x" in shape else (1, int(shape))
        gpu = GPUS[kind]
        chip = Chip(gpu.peak_flops, gpu.link_bytes, int(GPU_SHARE * gpu.memory_bytes))
        return Topology(name, _of_gpu(gpu, num_hosts, num_per_host), chip)
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        known = f"{', '.join(CHIPS)} and a grid, {', '.join(GPUS)} or {SIMULATED} and a number"
        raise InputError(f"the topology {name!r} is unknown; give {known}, such as {EXAMPLES}.")
    return Topology(name, _of_tpu(name, CHIPS[kind].config), CHIPS[kind])


def compiles_for_gpus() -> bool:
    """Whether one of JAX's CUDA plugins is installed."""
    with contextlib.suppress(ModuleNotFoundError):  # `jax_plugins` itself is absent
        return any(importlib.util.find_spec(module) for module in PLUGINS)
    return False


def compiler_options(effort: float) -> dict[str, int] | None:
    """XLA's options for an effort in [-1, 1]: its level O0 at -1, its default (O2) at 0, O3 at 1, and the nearest one between.

    JAX 0.12 has only levels. JAX 0.10 also takes an effort, and compiles the same program at -1 as at O0.
    """
    return {"optimization_level": EFFORT_LEVELS[round(1.5 * (effort + 1))]} if effort else None


def compile_for(mesh: Mesh, function: Any, *args: Any, effort: float = 0.0) -> Plan:
    """Compiles a function, such as a training step, and reads the compiler's figures for it.

    Args:
        mesh: of devices as `open_topology` gives them.
        function: under `jax.jit`.
        args: shapes, which lie on the mesh as in `function` or by their own shardings.
        effort: see `compiler_options`; at -1 the compiler is done several times sooner.
    """
    start = time.perf_counter()
    with layers.compiling_for(mesh.devices.flat[0].platform):
        lowered = function.lower(*args)
    try:
        compiled = lowered.compile(compiler_options=compiler_options(effort))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Plan(None, None, _first_sentence(str(error)), time.perf_counter() - start)
    seconds = time.perf_counter() - start
    sizes, kinds_of_bytes = compiled.memory_analysis(), ("argument", "output", "alias", "temp", "generated_code")
    memory = Memory(*(getattr(sizes, f"{kind}_size_in_bytes") for kind in kinds_of_bytes))
    text = compiled.as_text()
    kinds = tuple(kind for kind, scope in (("fused", attention.FUSED), ("plain", attention.PLAIN)) if scope in text)
    return Plan(memory, hlo.read_costs(text, mesh.size), None, seconds, kinds)


def lacks(memory: Memory | None, chip: Chip | None) -> str | None:
    """A sentence where a compiled program needs more memory than a device has; a TPU's compiler refuses such a program itself."""
    if memory is None or chip is None or memory.total <= chip.memory_bytes:
        return None
    return f"It takes {memory.total / GIB:.2f} GiB of the {chip.memory_bytes / GIB:.2f} that a device gives."


def estimate(costs: hlo.Costs, chip: Chip) -> Estimate:
    """A lower bound of a step's time; nothing is measured."""
    received = sum(collective.bytes for collective in costs.collectives)
    return Estimate(costs.flops / chip.peak_flops, received / chip.link_bytes)


def forward_flops(encoder: Any, lengths: np.ndarray) -> float:
    """FLOPs of an encoder's matrix products over texts of these lengths.

    Per token 2 x layer parameters + 4 x layers x heads x head_dim x length; embeddings, norms and pooling are not counted.
    A training step is three times as much.
    """
    joined = encoder.num_heads * encoder.head_dim
    kv_joined = getattr(encoder, "kv_heads", encoder.num_heads) * encoder.head_dim
    branches = 3 if encoder.is_gated else 2
    layer_parameters = encoder.num_layers * encoder.model_dim * (2 * joined + 2 * kv_joined + branches * encoder.mlp_dim)
    lengths = lengths.astype(np.float64)
    return float(np.sum(lengths * (2 * layer_parameters + 4 * encoder.num_layers * joined * lengths)))


def bytes_per_device(tree: Any) -> int:
    """Bytes that arrays, or their shapes with shardings, take up on each device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _simulated(num_devices: int) -> list[Any]:
    with contextlib.suppress(RuntimeError):  # JAX has started already; its devices may be enough
        jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.devices("cpu")
    if len(devices) < num_devices:
        raise InputError(f"{num_devices} simulated devices are asked for, but JAX has started with {len(devices)}.")
    return devices[:num_devices]


def _of_gpu(gpu: Gpu, num_hosts: int, num_per_host: int) -> list[Any]:
    """GPUs by their description, for which JAX's CUDA plugin compiles without a GPU, its driver or CUDA's libraries."""
    if not compiles_for_gpus():
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


def _of_tpu(name: str, config: str | None) -> list[Any]:
    with needs("plan", "compiling for a TPU"):
        import libtpu  # noqa: F401
    from jax.experimental import topologies

    for variable, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        options = {"chip_config_name": config} if config else {}
        return list(topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise InputError(f"the topology {name} cannot be: {_first_sentence(str(error))}") from error


def _first_sentence(message: str) -> str:
    sentence = message.partition("\n")[0].partition(": ")[2].strip()
    return sentence if sentence.endswith(".") else f"{sentence}."
