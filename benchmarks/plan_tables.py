"""Which batch, mesh and rematerialisation fit which TPUs? Prints the tables of docs/results/plans.md.

python -m benchmarks.plan_tables --results=docs/plans.jsonl

Compiles whatever `--results` lacks, one program at a time (minutes each), and adds it there as soon as it is known: the same
command continues. With everything there it only prints. Needs `pip install 'de-jax-retrieval[plan]'`, no TPU; nothing is run.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.files.outputs import progress_bar

XXL = "models/t5_1_1_xxl.gin"
BLOCK = 2048
LORA = [
    "Recipe.adapters=@Lora()",
    "Lora.pattern='.*/attention/(query|key|value|out)/kernel'",
    "Lora.base_dtype='bfloat16'",
]
"""Of recipes/lora.gin, without the model to start from."""


class Step(NamedTuple):
    """A training step to plan."""

    topology: str
    recipe: str
    model: str | None  # None: the recipe's own, T5 1.1 base
    batch_size: int
    mesh: str = ""  # beside data, which takes the other devices
    remat: str = "full"
    num_chunks: int = 1
    block_size: int | None = None
    rows: tuple[int, int] | None = None  # of packed queries and documents

    def arguments(self) -> list[str]:
        """Of `plan`."""
        loss = "samtone" if "samtone" in self.recipe else "in_batch_softmax"
        settings = [f"T5Config.remat={self.remat}", "T5Config.scan_layers=True", f"Devices.num_chunks={self.num_chunks}"]
        settings += [f"{loss}.block_size={self.block_size}"] if self.block_size else []
        settings += [f"make_mesh.{axis}" for axis in self.mesh.split()]
        files = [f"--gin_file={name}" for name in (f"recipes/{self.recipe}.gin", self.model) if name]
        rows = [f"--query_rows={self.rows[0]}", f"--doc_rows={self.rows[1]}"] if self.rows else []
        return [f"--topology={self.topology}", f"--batch_size={self.batch_size}", *files, *rows, *(f"--gin.{s}" for s in settings)]


class Rotary(NamedTuple):
    """A training step of a rotary encoder, symmetric, by the softmax of recipes/sde.gin."""

    topology: str
    model: str  # a file of models/
    batch_size: int
    mesh: str = ""
    num_chunks: int = 1
    has_adapters: bool = False  # those of recipes/lora.gin, beside a base in bfloat16

    def arguments(self) -> list[str]:
        """Of `plan`."""
        settings = ["RotaryConfig.remat=full", f"Devices.num_chunks={self.num_chunks}"]
        settings += [f"make_mesh.{axis}" for axis in self.mesh.split()]
        settings += LORA if self.has_adapters else []
        files = ["--gin_file=recipes/sde.gin", f"--gin_file=models/{self.model}.gin"]
        return [f"--topology={self.topology}", f"--batch_size={self.batch_size}", *files, *(f"--gin.{s}" for s in settings)]


class Loss(NamedTuple):
    """Value and gradient of SamToNe in both towers alone, by embeddings [batch, 768] split over the chips."""

    topology: str
    batch_size: int
    block_size: int | None


base = functools.partial(Step, recipe="samtone_both", model=None)
sde = functools.partial(Step, recipe="sde", model=XXL)
ade = functools.partial(Step, recipe="ade", model=XXL)


def row(topology: str, name: str, **settings: Any) -> Step:
    """A row of SamToNe's tables at the paper's shape: 512 pairs of 64 and 256 tokens."""
    return Step(topology, f"paper/samtone/{name}", None, 512, **settings)


BASE_STEPS = [
    base("v5e:2x2", batch_size=512, remat="none"),
    base("v5e:2x2", batch_size=512, remat="none", rows=(76, 156)),  # MS MARCO's mean lengths, 8.7 and 73 tokens, at 95%
    base("v5e:2x2", batch_size=512, remat="none", num_chunks=8),
    base("v5e:2x2", batch_size=512),
    base("v5e:2x2", batch_size=4096, num_chunks=8),
    base("v5e:2x2", batch_size=65536, num_chunks=128, block_size=BLOCK),
    base("v6e:2x2", batch_size=512, remat="none"),
]
XXL_STEPS = [
    sde("v5e:8x8", batch_size=512),
    sde("v5e:8x8", batch_size=512, mesh="fsdp=16"),
    sde("v5e:8x8", batch_size=512, mesh="fsdp=16 tensor=4"),
    sde("v5e:8x8", batch_size=4096, mesh="fsdp=16", num_chunks=8),
    sde("v5e:8x8", batch_size=65536, mesh="fsdp=16", num_chunks=128, block_size=BLOCK),
    ade("v5e:8x8", batch_size=512, mesh="fsdp=16"),
    sde("v6e:8x8", batch_size=512, mesh="fsdp=16", remat="dots"),
    sde("v6e:8x8", batch_size=4096, mesh="fsdp=16", num_chunks=4),
    sde("v5p:4x4x4", batch_size=4096, mesh="fsdp=16"),
    sde("v5e:16x16", batch_size=4096, mesh="fsdp=16", num_chunks=2),
    sde("v5e:16x16", batch_size=65536, mesh="fsdp=16", num_chunks=32, block_size=BLOCK),
    sde("v6e:16x16", batch_size=65536, mesh="fsdp=16", num_chunks=16, block_size=BLOCK),
    ade("v6e:16x16", batch_size=65536, mesh="fsdp=16", num_chunks=16, block_size=BLOCK),
]
PAPER_STEPS = [
    row("h100:8", "base_sde_query"),
    row("v5e:2x2", "large_sde_query", num_chunks=4),
    row("v5e:4x4", "large_sde_query"),
    row("v4:4x4x4", "xxl_sde_query", mesh="fsdp=16"),
]
ROTARY_STEPS = [
    Rotary("v5e:2x2", "embeddinggemma_300m", 512, "fsdp=4", 4),
    Rotary("v6e:2x2", "embeddinggemma_300m", 512),
    Rotary("h100:8", "embeddinggemma_300m", 512),
    Rotary("v5e:2x2", "qwen3_embedding_0_6b", 512, "fsdp=4", 8),
    Rotary("v6e:2x2", "qwen3_embedding_0_6b", 512, "fsdp=4", 4),
    Rotary("h100:8", "qwen3_embedding_0_6b", 512),
    Rotary("v5e:8x8", "qwen3_embedding_4b", 512, "fsdp=64"),
    Rotary("h100:8", "qwen3_embedding_4b", 512, "fsdp=8"),
    Rotary("v5e:8x8", "qwen3_embedding_8b", 512, "fsdp=64"),
    Rotary("v6e:8x8", "qwen3_embedding_8b", 512, "fsdp=64"),
    Rotary("h200:8", "qwen3_embedding_8b", 512, "fsdp=8"),
    Rotary("v5e:2x2", "qwen3_embedding_0_6b", 512, "fsdp=4", 8, has_adapters=True),
    Rotary("v6e:2x2", "qwen3_embedding_8b", 64, "fsdp=4", 4, has_adapters=True),
    Rotary("h100:8", "qwen3_embedding_8b", 512, "fsdp=8", 1, has_adapters=True),
]
LOSSES = [
    Loss(topology, batch_size, block_size)
    for topology in ("v5e:2x2", "v5e:8x8", "v5e:16x16")
    for batch_size in (512, 4096, 16384, 65536)
    for block_size in (None, BLOCK)
]
NEEDS = (
    *("GiB a chip: state + temporaries, of", "executed / useful FLOPs", "GB received a chip"),
    "products, links: seconds, at least",
)
COLUMNS = ("chips", "recipe", "batch", "mesh", "remat, chunks, block", *NEEDS)
ROTARY_COLUMNS = ("chips", "model", "trained", "batch", "mesh, chunks", *NEEDS, "GiB a checkpoint")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", required=True, help="JSON lines: a plan each; made here, and added to")
    path = Path(parser.parse_args(argv).results)
    found = {}
    if path.exists():
        found = {record["case"]: record for record in map(json.loads, path.read_text().splitlines())}
    for case in progress_bar([*LOSSES, *BASE_STEPS, *XXL_STEPS, *PAPER_STEPS, *ROTARY_STEPS]):
        if str(case) not in found:
            plan = loss_plan(case) if isinstance(case, Loss) else step_plan(case)
            found[str(case)] = {"case": str(case), **plan}
            with path.open("a") as file:
                file.write(json.dumps(found[str(case)]) + "\n")
    tables = {"T5 1.1 base, ADE-SPL, SamToNe in both towers": BASE_STEPS, "T5 1.1 XXL": XXL_STEPS}
    tables["SamToNe's rows at the paper's shape"] = PAPER_STEPS
    for heading, steps in tables.items():
        print(f"### {heading}\n\n{step_table(steps, found)}\n")
    print(f"### Rotary encoders\n\n{rotary_table(ROTARY_STEPS, found)}\n")
    print(f"### The loss alone\n\n{loss_table(LOSSES, found)}")


def step_plan(step: Step | Rotary) -> dict[str, Any]:
    """The report of `de-jax plan`, from its own process, which frees the memory of the program at its end."""
    command = [sys.executable, "-m", "plan", *step.arguments()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def loss_plan(case: Loss) -> dict[str, Any]:
    """Memory and collectives of the loss and its gradient."""
    import jax

    from de_jax.losses.in_batch import samtone
    from de_jax.training.mesh import plan, sharding
    from de_jax.types import Embeddings

    jax.config.update("jax_platforms", "cpu")
    topology = plan.open_topology(case.topology)
    mesh = sharding.make_mesh(devices=topology.devices)

    def rows(*shape: int, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((case.batch_size, *shape), dtype, sharding=sharding.by_rows(mesh))

    def value_of(query: Any, doc: Any, ids: Any) -> Any:
        return samtone(Embeddings(query, doc, ids, ids), same_tower="both", block_size=case.block_size)[0]

    vectors, ids = rows(768, dtype="float32"), rows(dtype="int32")
    gradient_of = sharding.traced_on(mesh, jax.value_and_grad(value_of, (0, 1)))
    gradient = jax.jit(gradient_of, out_shardings=(sharding.replicated(mesh), vectors.sharding))
    found = plan.compile_for(mesh, gradient, vectors, vectors, ids, effort=-1.0)
    if found.memory is None or found.costs is None:
        return {"fits": False, "why_not": found.why_not}
    return {
        "fits": True,
        "temporaries_gib": round(found.memory.temporaries / 2**30, 3),
        "collective_gib": round(sum(one.bytes for one in found.costs.collectives) / 2**30, 4),
        "estimate": plan.estimate(found.costs, topology.chip)._asdict(),
    }


def step_table(steps: list[Step], found: dict[str, Any]) -> str:
    """A row a step."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for step in steps:
        plan = found[str(step)]
        packed = f", {step.rows[0]} + {step.rows[1]} packed rows" if step.rows else ""
        mesh = " ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1)
        cells = [step.topology, step.recipe, f"{step.batch_size:,}{packed}", mesh]
        cells.append(", ".join(str(part) for part in (step.remat, step.num_chunks, step.block_size) if part is not None))
        lines.append(f"| {' | '.join([*cells, *_needs(plan)])} |")
    return "\n".join(lines)


def _needs(plan: dict[str, Any]) -> list[str]:
    """The cells of `NEEDS`."""
    if not plan["fits"]:
        return [f"**does not fit**: {plan['why_not']}", *[""] * (len(NEEDS) - 1)]
    memory, estimate = plan["memory_gib"], plan["estimate"]
    received = sum(one["bytes"] for one in plan["collectives"]) / 1e9
    return [
        f"{memory['arguments']:.1f} + {memory['temporaries']:.1f}, {plan['available_gib']}",
        f"{plan['executed_flops'] / plan['useful_flops']:.2f}",
        f"{received:.1f}",
        f"{estimate['compute_seconds']:.2f}, {estimate['collective_seconds']:.2f}",
    ]


def rotary_table(steps: list[Rotary], found: dict[str, Any]) -> str:
    """A row a step."""
    lines = [f"| {' | '.join(ROTARY_COLUMNS)} |", "|---" * len(ROTARY_COLUMNS) + "|"]
    for step in steps:
        plan = found[str(step)]
        trained = f"{plan['num_trained_parameters'] / 1e6:,.0f} M of {plan['num_parameters'] / 1e6:,.0f} M"
        mesh = " ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1)
        cells = [step.topology, step.model, trained, str(step.batch_size), f"{mesh}, {step.num_chunks}"]
        cells += [*_needs(plan), f"{plan['checkpoint_gib']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def loss_table(cases: list[Loss], found: dict[str, Any]) -> str:
    """A row for each batch, a column for each topology: GiB of temporaries, GiB that a chip receives, and the bounds in ms."""
    topologies = list(dict.fromkeys(case.topology for case in cases))
    lines = [f"| batch, block | {' | '.join(topologies)} |", "|---" * (1 + len(topologies)) + "|"]
    for batch_size, block_size in dict.fromkeys((case.batch_size, case.block_size) for case in cases):
        cells = [f"{batch_size:,}, {'dense' if block_size is None else block_size}"]
        for topology in topologies:
            plan = found[str(Loss(topology, batch_size, block_size))]
            if plan["fits"]:
                products, links = (1000 * plan["estimate"][name] for name in ("compute_seconds", "collective_seconds"))
                cells.append(f"{plan['temporaries_gib']} GiB; {plan['collective_gib']} GiB; {products:.2f}, {links:.2f} ms")
            else:
                cells.append("does not fit")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
