"""A model by every backend and library in one run, and its server at 1, 8 and 64 clients; prints one JSON line.

python -m benchmarks.serving --model all-MiniLM-L6-v2/ --dataset_dir data/beir/scifact --num_passages 256
pip install 'de-jax-retrieval[onnx,openvino,serve]' sentence-transformers fastembed

Of each: megabytes of weights, the largest difference from JAX in float32, milliseconds for one query (median of 20), and passages
per second from the text on (median of the repeats, which alternate). Other kinds of encoder have the model's sizes, vocabulary and
lengths, and random parameters. "batches of 32" sorts texts and batches them as sentence-transformers does for onnxruntime and
OpenVINO, and calls them with the same graph. Libraries that are not installed are left out. On a machine that others use, put
`taskset -c 0` before the command and add `--clock cpu`, which leaves the server out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import http.client
import importlib.util
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import de_jax
from benchmarks import measure
from de_jax import command
from de_jax.data.text import beir
from de_jax.model import Model
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.rotary import RotaryConfig
from de_jax.models.t5 import T5Config

Encode = Callable[[Sequence[str]], Any]
OURS = {
    "JAX, float32": ("jax", "float32"),
    "JAX, bfloat16": ("jax", "bfloat16"),
    "onnxruntime, float32": ("onnx", "float32"),
    "onnxruntime, int8": ("onnx-int8", "float32"),
    "OpenVINO, float32": ("openvino", "float32"),
    "OpenVINO, bfloat16": ("openvino", "bfloat16"),
}
SORTED = {"float32": "f32", "bfloat16": "bf16"}
"""Precisions of OpenVINO in batches of 32, and its names of them."""
CLIENTS = (1, 8, 64)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = command.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset_dir", required=True)
    parser.add_argument("--kinds", nargs="+", default=["model"], choices=("model", *KINDS), help="the model, others in its sizes")
    parser.add_argument("--only", default="", help="libraries whose names match this regular expression")
    parser.add_argument("--num_passages", type=int, default=256)
    parser.add_argument("--num_queries", type=int, default=200, help="requests to the server for each number of clients")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", default="wall", choices=tuple(measure.CLOCKS), help="wall, or cpu seconds of one core")
    args = parser.parse_args(argv)
    passages, queries = (
        [text for _, text in itertools.islice(beir.iter_docs(beir.find_file(args.dataset_dir, kind)), number)]
        for kind, number in (("corpus", args.num_passages), ("queries", args.num_queries))
    )
    model = de_jax.load(args.model, dtype="float32")
    report: dict[str, Any] = {"clock": args.clock, "load_before": os.getloadavg()[0], **measure.environment()}
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder) / "exported"
            of_kind(model, kind).save(exported, format="onnx")
            now = measure.CLOCKS[args.clock]
            report[kind] = libraries(exported, passages, queries, repeats=args.repeats, now=now, only=args.only)
        measure.log(f"{kind}: {json.dumps(report[kind])}")
    if args.clock == "wall":
        report["server"] = served(args.model, queries)
    print(json.dumps(report | {"load_after": os.getloadavg()[0]}))


KINDS: dict[str, Callable[..., Any]] = {
    "T5": T5Config,
    "ModernBERT": RotaryConfig,
    "Qwen3": functools.partial(
        RotaryConfig,
        activation="silu",
        norm="rms",
        norm_embeddings=False,
        causal=True,
        global_every=1,
        qk_norm=True,
        num_kv_heads=2,
    ),
}


def of_kind(model: Model, kind: str) -> Model:
    """The model itself, or one of a kind with random parameters, in its sizes."""
    tower = model.run.model.doc
    if kind == "model":
        return model
    sizes = {name: getattr(tower.encoder, name) for name in ("vocab_size", "model_dim", "num_layers", "num_heads", "mlp_dim")}
    if kind != "MPNet":
        sizes["head_dim"] = sizes["model_dim"] // sizes["num_heads"]
    pooling = "last" if kind == "Qwen3" else tower.pooling
    config = dataclasses.replace(tower, encoder=KINDS[kind](**sizes, dtype="float32"), pooling=pooling)
    dual = DualEncoder(config, config)
    params = jax.device_put(jax.jit(dual.init)(jax.random.key(0)), jax.tree.leaves(model.run.params)[0].sharding)
    return Model(model.run._replace(model=dual, params=params, unused={}))


def libraries(
    exported: Path, passages: list[str], queries: list[str], *, repeats: int, now: Callable[[], float], only: str = ""
) -> dict[str, Any]:
    """{library: {"megabytes", "difference", "query_ms", "passages_per_s"}}."""
    towers = {name: de_jax.load(exported, backend=backend, dtype=dtype) for name, (backend, dtype) in OURS.items()}  # type: ignore[arg-type]
    encoders: dict[str, Encode] = {name: tower.encode_document for name, tower in towers.items()}
    encoders |= batches_of_32(exported) | peers(exported)

    def seconds(encode: Encode, texts: Sequence[str]) -> float:
        began = now()
        encode(texts)
        return now() - began

    expected, found = encoders["JAX, float32"](passages), {}
    encoders = {name: encode for name, encode in encoders.items() if re.search(only, name)}
    for name, encode in encoders.items():
        difference = float(np.abs(np.asarray(encode(passages)) - expected).max())  # compiles too
        for query in queries[:20]:
            encode([query[:200]])
        file = "onnx/model_quantized.onnx" if "int8" in name else "onnx/model.onnx"
        found[name] = {"megabytes": round((exported / file).stat().st_size / 1e6, 1), "difference": difference}
    waits: dict[str, list[float]] = {name: [] for name in encoders}
    taken: dict[str, list[float]] = {name: [] for name in encoders}
    for query, (name, encode) in itertools.product(queries[:20], encoders.items()):
        waits[name].append(seconds(encode, [query[:200]]) * 1000)
    for _, (name, encode) in itertools.product(range(repeats), encoders.items()):
        taken[name].append(len(passages) / seconds(encode, passages))
    for name, rates in taken.items():
        found[name] |= {"query_ms": round(statistics.median(waits[name]), 2), "passages_per_s": round(statistics.median(rates), 1)}
        found[name]["lowest"] = round(min(rates), 1)
    return found


def batches_of_32(exported: Path) -> dict[str, Encode]:
    """onnxruntime and OpenVINO as sentence-transformers calls them: the longest texts first, 32 at a time, without its torch."""
    import onnxruntime
    import tokenizers

    settings = json.loads((exported / "tokenizer_config.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    tokenizer.enable_truncation(settings["model_max_length"])
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(settings["pad_token"]), pad_token=settings["pad_token"])

    def encode(run: Callable[[dict[str, np.ndarray]], np.ndarray], texts: Sequence[str]) -> np.ndarray:
        order, parts = np.argsort([-len(text) for text in texts], kind="stable"), []
        for start in range(0, len(texts), 32):
            encoded = tokenizer.encode_batch([texts[row] for row in order[start : start + 32]])
            ids, mask = (np.array([getattr(one, name) for one in encoded]) for name in ("ids", "attention_mask"))
            parts.append(np.array(run({"input_ids": ids, "attention_mask": mask})))
        return np.concatenate(parts)[np.argsort(order)]

    found: dict[str, Encode] = {}
    for name, file in {"float32": "model.onnx", "int8": "model_quantized.onnx"}.items():
        session = onnxruntime.InferenceSession(exported / "onnx" / file, providers=["CPUExecutionProvider"])
        run = functools.partial(session.run, ["sentence_embedding"])
        found[f"onnxruntime, {name}, batches of 32"] = functools.partial(encode, lambda feeds, run=run: run(feeds)[0])
    if importlib.util.find_spec("openvino"):
        import openvino

        for name, hint in SORTED.items():
            compiled = openvino.Core().compile_model(
                str(exported / "onnx" / "model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": hint}
            )
            one = functools.partial(encode, lambda feeds, compiled=compiled: compiled(feeds)["sentence_embedding"])
            found[f"OpenVINO, {name}, batches of 32"] = one
    return found


def peers(exported: Path) -> dict[str, Encode]:
    """The libraries that open the folder, if they are installed."""
    found: dict[str, Encode] = {}
    if importlib.util.find_spec("sentence_transformers"):
        import sentence_transformers

        found["sentence-transformers, float32"] = sentence_transformers.SentenceTransformer(str(exported), device="cpu").encode
    if importlib.util.find_spec("fastembed"):
        import fastembed
        from fastembed.common.model_description import ModelSource, PoolingType

        dim, name = de_jax.load(exported).embedding_dim, str(exported)
        options = {"pooling": PoolingType.DISABLED, "normalization": False, "sources": ModelSource(hf="a/b"), "dim": dim}
        fastembed.TextEmbedding.add_custom_model(name, model_file="onnx/model.onnx", **options)
        embed = fastembed.TextEmbedding(name, specific_model_path=name).embed
        found["fastembed, float32"] = lambda texts: list(embed(list(texts), batch_size=32))
    return found


def served(model: str, queries: list[str]) -> dict[str, Any]:
    """{clients: {"requests_per_s", "p50_ms", "p99_ms"}} of `de-jax serve`, a query each, and {"one by one": ...}."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [f"--run_dir={model}", f"--port={port}"]
    process = subprocess.Popen([sys.executable, "-m", "de_jax", "serve", *flags], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    process.stdout.readline()
    try:
        asked(port, queries, 64)  # compiles
        return {f"{number} clients": asked(port, queries, number) for number in CLIENTS} | {
            "one by one": one_by_one(model, queries)
        }
    finally:
        process.terminate()
        process.wait()


def asked(port: int, queries: list[str], clients: int) -> dict[str, float]:
    """Of so many clients, each with one connection, that ask all queries between them."""

    def ask(own: list[str]) -> list[float]:
        connection, taken = http.client.HTTPConnection("127.0.0.1", port), []
        for attempt in range(100):
            try:
                connection.connect()
                break
            except OSError:
                time.sleep(0.1 * (attempt < 99))
        for query in own:
            began = time.perf_counter()
            connection.request(
                "POST", "/v1/embeddings", json.dumps({"model": "query", "input": query, "encoding_format": "base64"})
            )
            answer = connection.getresponse()
            assert answer.read()
            assert answer.status == 200
            taken.append(time.perf_counter() - began)
        return taken

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        taken = [one for part in pool.map(ask, [queries[number::clients] for number in range(clients)]) for one in part]
    return rates(taken, time.perf_counter() - began)


def one_by_one(model: str, queries: list[str]) -> dict[str, float]:
    """Calls of `encode_query` in this process."""
    encode = de_jax.load(model).encode_query
    for query in queries:
        encode(query)
    began = time.perf_counter()
    times = [began, *((encode(query), time.perf_counter())[1] for query in queries)]
    return rates(np.diff(times).tolist(), times[-1] - began)


def rates(taken: list[float], total: float) -> dict[str, float]:
    found = {
        "requests_per_s": len(taken) / total,
        "p50_ms": np.percentile(taken, 50) * 1000,
        "p99_ms": np.percentile(taken, 99) * 1000,
    }
    return {name: round(float(value), 1) for name, value in found.items()}


if __name__ == "__main__":
    main()
