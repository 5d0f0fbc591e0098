"""Runs as ONNX files in the layout of sentence-transformers, with its files beside them; torch is not needed to write them.

onnx/model.onnx             float32, for sentence-transformers, fastembed, text-embeddings-inference and OpenVINO
onnx/model_fp16.onnx        half the size, computed in float32
onnx/model_quantized.onnx   int8, a quarter of the size

Different towers become query/ and document/, each with these files.
"""

from __future__ import annotations

from pathlib import Path

from de_jax.interop import sentence_transformers_export
from de_jax.models import onnx_graph
from de_jax.retrieval import sessions
from de_jax.training.run.run_folder import Run

FILES: dict[str, onnx_graph.Precision] = {"model.onnx": "float32", "model_fp16.onnx": "float16", "model_quantized.onnx": "int8"}
"""Names as Transformers.js knows them."""


def write(folder: Path, run: Run, license: str | None = None) -> None:
    """Writes a run into an existing folder; `onnx_graph` describes inputs and results of the files.

    Raises:
        InputError: onnx is not installed, or neither it nor sentence-transformers has a place for the model.
    """
    sentence_transformers_export.write(folder, run)
    names = {"query": "query", "doc": "document"} if (folder / "query").is_dir() else {"doc": ""}
    for tower, name in names.items():
        side, (config, params) = run.side(tower), run.tower(tower)
        notes = {"max_length": str(side.max_length), "license": license or "", "step": str(run.step)}
        notes |= {"tower": name or "query and document", "prompt": side.prompt if name else ""}
        (folder / name / "onnx").mkdir()
        for file, precision in FILES.items():
            graph = onnx_graph.model_of(config, params, precision, pad_id=side.tokenizer.pad_id, notes=notes)
            sessions.save(graph, folder / name / "onnx" / file)
