"""A model by every backend and library in one run, and its server at 1, 8 and 64 clients; prints one JSON line.

python -m benchmarks.serving --model all-MiniLM-L6-v2/ --dataset_dir data/beir/scifact --num_passages 256
pip install 'de-jax-retrieval[onnx,openvino,serve]' sentence-transformers fastembed

Of each: megabytes of weights, the largest difference from JAX in float32, milliseconds for one query (median of 30), and passages
per second from the text on (median of the repeats, which alternate). Libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import importlib.util
import itertools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import de_jax
from de_jax import command
from de_jax.data.text import beir

Encode = Callable[[Sequence[str]], Any]
OURS = {
    "JAX, float32": ("jax", "float32"),
    "JAX, bfloat16": ("jax", "bfloat16"),
    "onnxruntime, float32": ("onnx", "float32"),
    "onnxruntime, int8": ("onnx-int8", "float32"),
    "OpenVINO, float32": ("openvino", "float32"),
    "OpenVINO, bfloat16": ("openvino", "bfloat16"),
}
CLIENTS = (1, 8, 64)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = command.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset_dir", required=True)
    parser.add_argument("--num_passages", type=int, default=256)
    parser.add_argument("--num_queries", type=int, default=200, help="requests to the server for each number of clients")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    passages, queries = (
        [text for _, text in itertools.islice(beir.iter_docs(beir.find_file(args.dataset_dir, kind)), number)]
        for kind, number in (("corpus", args.num_passages), ("queries", args.num_queries))
    )
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "exported"
        de_jax.load(args.model, dtype="float32").save(exported, format="onnx")
        report = {"libraries": libraries(exported, passages, queries, args.repeats), "server": served(args.model, queries)}
    print(json.dumps(report))


def libraries(exported: Path, passages: list[str], queries: list[str], repeats: int) -> dict[str, Any]:
    """{library: {"megabytes", "difference", "query_ms", "passages_per_s"}}."""
    towers = {name: de_jax.load(exported, backend=backend, dtype=dtype) for name, (backend, dtype) in OURS.items()}  # type: ignore[arg-type]
    encoders: dict[str, Encode] = {name: tower.encode_document for name, tower in towers.items()}
    encoders |= peers(exported)
    expected, found = encoders["JAX, float32"](passages), {}
    for name, encode in encoders.items():
        difference = float(np.abs(np.asarray(encode(passages)) - expected).max())  # compiles too
        encode(queries[:1])
        milliseconds = [seconds(encode, queries[number % len(queries)][:200]) * 1000 for number in range(30)]
        file = "onnx/model_quantized.onnx" if "int8" in name else "onnx/model.onnx"
        size = (exported / file).stat().st_size / 1e6
        found[name] = {"megabytes": round(size, 1), "difference": difference, "query_ms": round(statistics.median(milliseconds), 2)}
    taken: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(repeats):
        for name, encode in encoders.items():
            taken[name].append(len(passages) / seconds(encode, passages))
    for name, rates in taken.items():
        found[name] |= {"passages_per_s": round(statistics.median(rates), 1), "lowest": round(min(rates), 1)}
    return found


def seconds(encode: Encode, texts: Sequence[str]) -> float:
    began = time.perf_counter()
    encode([texts] if isinstance(texts, str) else texts)
    return time.perf_counter() - began


def peers(exported: Path) -> dict[str, Encode]:
    """The libraries that open the folder, if they are installed."""
    found: dict[str, Encode] = {}
    if importlib.util.find_spec("sentence_transformers"):
        import sentence_transformers

        found["sentence-transformers, float32"] = sentence_transformers.SentenceTransformer(str(exported), device="cpu").encode
    if importlib.util.find_spec("fastembed"):
        import fastembed
        from fastembed.common.model_description import ModelSource, PoolingType

        dim = de_jax.load(exported).embedding_dim
        options = {"pooling": PoolingType.DISABLED, "normalization": False, "sources": ModelSource(hf="a/b"), "dim": dim}
        fastembed.TextEmbedding.add_custom_model("ours", model_file="onnx/model.onnx", **options)
        embed = fastembed.TextEmbedding("ours", specific_model_path=str(exported)).embed
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
    taken = [seconds(encode, query) for query in queries]
    return rates(taken, time.perf_counter() - began)


def rates(taken: list[float], total: float) -> dict[str, float]:
    found = {
        "requests_per_s": len(taken) / total,
        "p50_ms": np.percentile(taken, 50) * 1000,
        "p99_ms": np.percentile(taken, 99) * 1000,
    }
    return {name: round(float(value), 1) for name, value in found.items()}


if __name__ == "__main__":
    main()
