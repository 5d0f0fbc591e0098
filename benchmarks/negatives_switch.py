"""How long does a new generation of hard negatives hold up the training loop? Prints one JSON line.

python -m benchmarks.negatives_switch --num_pairs 500000 --num_negatives 20 --num_docs 8800000

A loop of updates draws negatives for its batches while a generation of `--num_pairs` lists of `--num_negatives` rows appears. Once
it is read by a thread, once by the loop, as in a run that mines by itself; the hook is the same.
An update sleeps, as a host does while its accelerator computes.

hook_ms       the longest and the summed time in the hook, and the processor time of the loop's thread in it
step_ms       the median update, and the longest one while the generation was read; undisturbed_step_ms: before there was one
in_force      seconds from the first look at the generation until its switch is on the disk
speedup       the longest time in the hook, loop over thread
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from de_jax import command
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations, mined_pairs
from de_jax.data.negatives.mined_negatives import MinedNegatives
from de_jax.data.negatives.mined_pairs import MinedPairs
from de_jax.data.stores.corpus import TokenStore
from de_jax.mining.mining_run import FollowNegatives
from de_jax.training.mesh import distributed
from de_jax.types import TrainState

BATCH_SIZE, EVERY_STEPS = 128, 10
FORMS = ("thread", "loop")
UNDISTURBED_STEPS, LONGEST_STEPS = 150, 100_000


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    print(json.dumps({"benchmark": "negatives_switch", **measured(args), **measure.environment()}))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures that the command prints."""
    rng = np.random.default_rng(args.seed)
    stores = _store("q", args.num_pairs), _store("d", args.num_docs)
    pairs = np.stack([np.arange(args.num_pairs), rng.integers(args.num_docs, size=args.num_pairs)], axis=1).astype(np.int32)
    texts = TrainingPairs("synthetic", *stores, pairs, {})
    report: dict[str, Any] = {name: getattr(args, name) for name in ("num_pairs", "num_negatives", "num_docs", "step_seconds")}
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        for form in args.forms:
            mines_in = Path(folder) if form == "loop" else None  # such a run waits for the reading
            mined = MinedNegatives(Path(folder) / form, None, texts, num_drawn={"neg_docs": 1})
            generations.write_generation(mined.negatives_dir, 1, _drawn(texts, 1, rng), {})
            mined.begin()
            undisturbed = _followed(mined, mines_in, args.step_seconds, num_steps=UNDISTURBED_STEPS)["step_ms"]
            start = time.perf_counter()
            written = generations.write_generation(mined.negatives_dir, 2, _drawn(texts, args.num_negatives, rng), {})
            size = sum(path.stat().st_size for path in written.folder.iterdir())
            report[form] = {"write_seconds": round(time.perf_counter() - start, 2), "mib": round(size / 2**20, 1)}
            report[form] |= _followed(mined, mines_in, args.step_seconds) | {"undisturbed_step_ms": undisturbed}
            measure.log(json.dumps({form: report[form]}))
    longest = {form: report[form]["hook_ms"]["longest"] for form in args.forms}
    return {**report, "speedup": round(longest["loop"] / longest["thread"], 1) if len(longest) == len(FORMS) else None}


def _followed(mined: MinedNegatives, run_dir: Path | None, step_seconds: float, num_steps: int = LONGEST_STEPS) -> dict[str, Any]:
    """The times of a loop of updates until the newest generation gives its negatives, or of so many updates."""
    hook = FollowNegatives(mined, every_steps=EVERY_STEPS, run_dir=run_dir)
    state, rng = TrainState(np.zeros(()), {}, (), np.zeros(())), np.random.default_rng(0)
    steps: list[float] = []
    hooks: list[float] = []
    first_look = switched = in_processor = 0.0
    distributed.is_first()  # starts JAX
    for step in range(1, num_steps + 1):
        start = time.perf_counter()
        mined.at(step)["neg_docs"].draw(rng.integers(len(mined.texts.pairs), size=BATCH_SIZE), (0, step))
        time.sleep(step_seconds)
        looked, before = time.perf_counter(), time.thread_time()
        hook(step, state, {})
        ended, in_processor = time.perf_counter(), in_processor + time.thread_time() - before
        steps.append(ended - start)
        if step % EVERY_STEPS == 0:
            hooks.append(ended - looked)
            first_look = first_look or looked
        if len(mined.switches) == 2:
            switched = switched or ended
            if mined.generation_at(step) == 2:
                break
    return {
        "hook_ms": {
            "longest": round(1000 * max(hooks), 2),
            "sum": round(1000 * sum(hooks), 2),
            "cpu": round(1000 * in_processor, 2),
        },
        "step_ms": {"median": round(1000 * statistics.median(steps), 2), "longest": round(1000 * max(steps), 2)},
        "in_force_seconds": round(switched - first_look, 2),
        "num_steps": len(steps),
    }


def _drawn(texts: TrainingPairs, num_negatives: int, rng: np.random.Generator) -> MinedPairs:
    """Random negatives of every pair."""
    docs = rng.integers(texts.doc_store.num_texts, size=(len(texts.pairs), num_negatives), dtype=np.int32)
    ids = {"query_ids": texts.query_store.encoded_ids, "doc_ids": texts.doc_store.encoded_ids}
    scores = np.zeros((len(docs), 1 + num_negatives), np.float32)
    return mined_pairs.of_rows(texts.pairs, docs, np.zeros((len(docs), 0), np.int32), scores, **ids)


def _store(kind: str, num_texts: int) -> TokenStore:
    """Ids without texts."""
    ids = np.char.add(kind.encode(), np.arange(num_texts).astype(f"S{len(str(num_texts))}"))
    arrays = {"tokens.npy": np.zeros(0, np.int32), "offsets.npy": np.zeros(num_texts + 1, np.int64), "ids.npy": ids}
    arrays["id_order.npy"] = np.argsort(ids, kind="stable")
    said = {"vocab_size": 2, "prefix_ids": (), "suffix_ids": (), "tokenizer_fingerprint": kind, "content_hash": kind}
    return TokenStore(Path(kind), said, arrays)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument(
        "--num_pairs", type=int, default=500_000, help="training pairs, each with a query of its own (default 500000)"
    )
    parser.add_argument("--num_negatives", type=int, default=20, help="of each pair (default 20)")
    parser.add_argument("--num_docs", type=int, default=8_800_000, help="documents to draw from (default 8800000)")
    parser.add_argument("--step_seconds", type=float, default=0.05, help="seconds an update keeps the device busy (default 0.05)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="what to measure (default both)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work_dir", help="where generations are written (default the system's temporary folder)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
