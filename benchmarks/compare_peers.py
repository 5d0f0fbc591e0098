"""Training and encoding beside sentence-transformers in bfloat16, on MS MARCO-like lengths, in one run; prints one JSON line.

python -m benchmarks.compare_peers --model small --batch_size 32
python -m benchmarks.compare_peers --model base --batch_size 512 --num_passages 20000 --num_queries 50000 --peak_tflops 790

Gives the medians of `step_time` and `encode_throughput`, whose own output says more: how many times as fast ours is as the peer
and as the peer by torch.compile. The peer encodes with sentence-transformers, sorted by length, where it is installed, and
trains as it does: padded to each batch's longest text, under autocast. On a machine that others use, put `taskset -c 0` before
the command and add `--clock cpu`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks import encode_throughput, measure, step_time
from de_jax import command

NAMES = {
    "ours": "ours",
    "peer": "peer",
    "peer_compiled": "peer_compiled",
    "peer_bfloat16": "peer",
    "peer_bfloat16_compiled": "peer_compiled",
}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    common = ["--model", args.model, "--repeats", str(args.repeats), "--clock", args.clock]
    common += ["--dataset_dir", args.dataset_dir] if args.dataset_dir else []
    peak = args.peak_tflops or measure.peak_tflops("bfloat16", args.clock)
    common += ["--peak_tflops", str(peak), *([] if args.no_compiled else ["--peer_compiled"])]
    sizes = ["--num_passages", str(args.num_passages), "--num_queries", str(args.num_queries)]
    encoding = encode_throughput.measured([*common, *sizes, "--peer_dtypes", "bfloat16"])
    lengths = ["--query_length", "64", "--doc_length", "256"] if args.dataset_dir else ["--real_lengths"]
    step = step_time.measured([*common, *lengths, "--batch_size", str(args.batch_size)])
    work = {"training_step": step, "encode_passages": encoding["passages"], "encode_queries": encoding["queries"]}
    report: dict[str, Any] = {"benchmark": "compare_peers", "model": args.model, "clock": args.clock, "peer": encoding["peer"]}
    report |= {"batch_size": args.batch_size, "peak_tflops": round(peak, 4)}
    for figure in ("speedup", "per_second", "mfu_useful"):
        report[figure] = {name: _figure(figure, found) for name, found in work.items()}
    print(json.dumps(report | {"sizes": step["sizes"], **measure.environment()}))


def _figure(figure: str, found: dict[str, Any]) -> Any:
    if figure == "speedup":
        return {NAMES[name]: ratios["median"] for name, ratios in found["speedup"].items()}
    if figure == "per_second":
        rates = found.get("pairs_per_second") or found["texts_per_second"]
        return {NAMES[name]: rate for name, rate in rates.items()}
    return found[figure]


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help=measure.MODEL_HELP)
    parser.add_argument("--dataset_dir", help="a BEIR folder, whose texts are taken; needs a model in a folder")
    parser.add_argument("--batch_size", type=int, default=32, help="pairs of a training step (default 32)")
    parser.add_argument("--num_passages", type=int, default=1000, help="passages to encode (default 1000)")
    parser.add_argument("--num_queries", type=int, default=4000, help="queries to encode (default 4000)")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each side (default 5)")
    parser.add_argument("--no_compiled", action="store_true", help="leave torch.compile out")
    parser.add_argument("--peak_tflops", type=float, help="what MFU is relative to (H200: 790); default: measured by a matmul")
    parser.add_argument("--clock", default="wall", choices=tuple(measure.CLOCKS), help="wall, or cpu seconds of one core")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
