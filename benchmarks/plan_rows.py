"""Does every row of the papers fit its devices? Prints the table of docs/results/plans.md.

python -m benchmarks.plan_rows --results=docs/row_plans.jsonl

Compiles the training step of each recipe of recipes/paper/ that `--results` lacks, one at a time (about a minute each), and adds
it there at once: the same command continues. Rows whose steps differ only in numbers, such as the rate, share a plan, which
`planned_as` names. `--only=ance` plans the rows whose names begin so. The weights' sizes are those of
`experiments.stand_in_weights`. Needs `pip install 'de-jax-retrieval[dev,plan]'`, no TPU; nothing is run.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from de_jax.data.sources.options import texts_of_a_pair
from de_jax.files import outputs
from de_jax.files.outputs import progress_bar
from de_jax.planner import plan
from de_jax.settings import name_of
from de_jax.training.mesh.plan import open_topology
from experiments import stand_in_weights

T5 = ("T5Config.remat='full'", "T5Config.scan_layers=True")
BERT = ("BertConfig.remat='full'", "BertConfig.scan_layers=True")
REMAT = ("pretrained_tower.remat='full'", "pretrained_tower.scan_layers=True")
DEVICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "samtone/base_*": ("v5e:2x2", T5),
    "samtone/large_*": ("v5e:4x4", T5),
    "samtone/xxl_*": ("v4:4x4x4", (*T5, "make_mesh.fsdp=16")),
    "ance/openqa_*": ("v5e:2x2", REMAT),
    "ance/*": ("v5e:2x2", BERT),
    "dance/*": ("v5e:2x2", REMAT),
    "daft/*_align": ("v5e:2x2", REMAT),
    "daft/*": ("v5e:2x4", REMAT),
    "curriculum/*": ("v5e:2x2", REMAT),
}
"""By the first pattern that a row's name fits, the devices and the settings beside the recipe's."""
KEPT = ("batch_size", "mesh", "fits", "why_not", "available_gib", "memory_gib", "num_parameters", "compile_seconds", "jax")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", required=True, type=Path, help="JSON lines: a plan each; made here, and added to")
    parser.add_argument("--only", default="", help="the beginning of the names of rows to plan")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    results = args.results.resolve()
    found = read(results)
    wanted = [row for row in stand_in_weights.rows() if row.startswith(args.only) and row not in found]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        stand_in_weights.write_models(Path(folder))
        planned = {_step_of(row): row for row, record in found.items() if "planned_as" not in record}
        for row in progress_bar(wanted):
            topology, settings = devices(row)
            if like := planned.get(step := _step_of(row)):
                found[row] = {**found[like], "row": row, "planned_as": like}
            else:
                made = plan(stand_in_weights.read_row(row, settings), open_topology(topology))
                found[row] = {"row": row, "topology": topology, "settings": settings, **{name: made[name] for name in KEPT}}
                planned[step] = row
            with outputs.atomic_file(results) as temporary:
                temporary.write_text("".join(f"{json.dumps(record)}\n" for record in found.values()))
    print("\n".join(table(found)))


def read(results: Path) -> dict[str, dict[str, Any]]:
    """The plans that are there, by row."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {record["row"]: record for record in map(json.loads, lines)}


def devices(row: str) -> tuple[str, tuple[str, ...]]:
    """The topology that a row is planned for, and the settings beside its recipe's."""
    return next(value for pattern, value in DEVICES.items() if fnmatch.fnmatch(row, pattern))


def table(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for the rows of a paper with equal needs."""
    yield "| recipes | chips | batch | mesh | remat | GiB a chip: state + temporaries, of |"
    yield "|---" * 6 + "|"
    alike: dict[tuple[str, str], list[str]] = {}
    for row, record in sorted(found.items()):
        alike.setdefault((row.partition("/")[0], _needs(record)), []).append(f"`{row}`")
    for (_, needs), names in alike.items():
        yield f"| {', '.join(names)} | {needs} |"


def _needs(record: dict[str, Any]) -> str:
    mesh = " ".join(f"{axis} {size}" for axis, size in record["mesh"].items() if size > 1)
    remat = "full" if any("remat" in setting for setting in record["settings"]) else "none"
    if not record["fits"]:
        needs = f"**does not fit**: {record['why_not']}"
    else:
        memory = record["memory_gib"]
        needs = f"{memory['arguments']:.1f} + {memory['temporaries']:.1f}, {record['available_gib']}"
    return " | ".join((record["topology"], str(record["batch_size"]), mesh, remat, needs))


def _step_of(row: str) -> str:
    """All that decides a row's compiled step, except numbers such as rates, temperatures and the number of updates."""
    recipe = stand_in_weights.read_row(row, devices(row)[1])
    options, training = recipe.options, recipe.optimization
    assert options is not None
    sizes = (options.batch_size, options.max_query_length, options.max_doc_length, texts_of_a_pair(recipe.options))
    named = {name: value for name, value in getattr(recipe.loss, "keywords", {}).items() if name != "temperature"}
    loss = (name_of(recipe.loss), named)
    parts = (name_of(training.optimizer), training.frozen, training.clip_norm is None, recipe.negatives.negative_cache)
    return repr((devices(row), recipe.model, sizes, loss, parts))


if __name__ == "__main__":
    main()
