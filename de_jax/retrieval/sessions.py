"""Towers in onnxruntime or OpenVINO: a graph of `models.onnx_graph`, computed on the CPU in place of JAX's program."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from de_jax.models import onnx_graph
from de_jax.settings import needs
from de_jax.training.run.run_folder import Run

Compute = Callable[[dict[str, np.ndarray]], np.ndarray]


class Session:
    """One tower of a run ("query" or "doc"), of a backend other than "jax", as an `encode.EncodeFn` of one text in each row."""

    def __init__(self, run: Run, tower: str) -> None:
        config, params = run.tower(tower)
        precision: onnx_graph.Precision = "int8" if run.backend == "onnx-int8" else "float32"
        graph = onnx_graph.model_of(config, params, precision)
        with tempfile.TemporaryDirectory() as folder:
            is_large = num_bytes(graph) >= onnx_graph.MAX_BYTES
            source: Any = save(graph, Path(folder) / "model.onnx") if is_large else graph.SerializeToString()
            self._compute = _openvino(source, config.encoder.dtype) if run.backend == "openvino" else _onnxruntime(source)
        self._dim = config.embedding_dim

    def __call__(self, tokens: Int[np.ndarray, "b L"], lengths: Int[np.ndarray, "b 1"]) -> Float[np.ndarray, "b 1 D"]:
        sizes = lengths[:, 0]
        found = np.zeros((len(tokens), 1, self._dim), np.float32)
        if (is_text := sizes > 0).any():
            ids = np.asarray(tokens)[is_text, : int(sizes.max())]
            found[is_text, 0] = self._compute({"input_ids": ids.astype(np.int64), "attention_mask": (ids != 0).astype(np.int64)})
        return found


def num_bytes(graph: Any) -> int:
    """About as many as the graph's file has; a message beyond 2 GiB does not say its own size."""
    return sum(len(array.raw_data) for array in graph.graph.initializer)


def save(graph: Any, path: Path) -> Path:
    """Writes a graph, with arrays of more than 2 GiB in a file beside it, as Transformers.js looks for them."""
    import onnx

    beside = num_bytes(graph) >= onnx_graph.MAX_BYTES
    onnx.save_model(graph, path, save_as_external_data=beside, location=f"{path.name}_data" if beside else None)
    return path


def _onnxruntime(source: Any) -> Compute:
    with needs("onnx", "the backend"):
        import onnxruntime
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(["sentence_embedding"], feeds)[0]  # type: ignore[no-any-return]


def _openvino(source: Any, dtype: str) -> Compute:
    with needs("openvino", "the backend"):
        import openvino
    core = openvino.Core()
    hints = {"INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype], "PERFORMANCE_HINT": "LATENCY"}
    compiled = core.compile_model(core.read_model(source), "CPU", hints)
    return lambda feeds: compiled(feeds)["sentence_embedding"]  # type: ignore[no-any-return]
