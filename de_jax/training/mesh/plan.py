"""Plans of a training step on remote devices: compiled ahead of time, never run."""

from __future__ import annotations

import contextlib
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
from de_jax.training.mesh import absent_gpus, hlo
from de_jax.types import InputError

GIB = 2**30


class Chip(NamedTuple):
    """One TPU chip, as docs.cloud.google.com/tpu/docs/<name> has it, or one GPU."""

    peak_flops: float  # per second, bfloat16
    link_bytes: float  # per second that all its links together can receive: half of the bidirectional figure
    memory_bytes: int  # the compiler's limit for a program; of a GPU, the share that JAX takes by default
    config: str | None = None  # the compiler's, where by default a chip is more than one device


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
    if kind in absent_gpus.GPUS and re.fullmatch(r"([1-9]\d*x)?[1-9]\d*", shape):
        num_hosts, num_per_host = map(int, shape.rpartition("x")[::2]) if "x" in shape else (1, int(shape))
        gpu = absent_gpus.GPUS[kind]
        chip = Chip(gpu.peak_flops, gpu.link_bytes, int(absent_gpus.DEFAULT_SHARE * gpu.memory_bytes))
        return Topology(name, absent_gpus.devices(gpu, num_hosts, num_per_host), chip)
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        known = f"{', '.join(CHIPS)} and a grid, {', '.join(absent_gpus.GPUS)} or {SIMULATED} and a number"
        raise InputError(f"the topology {name!r} is unknown; give {known}, such as {EXAMPLES}.")
    return Topology(name, _of_tpu(name, CHIPS[kind].config), CHIPS[kind])


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
