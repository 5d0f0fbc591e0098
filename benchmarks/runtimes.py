"""A torch tower in the runtimes that a user of a CPU would take: ONNX Runtime and OpenVINO.

pip install onnx onnxscript onnxruntime openvino
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUNTIMES = ("onnxruntime", "openvino")


def installed() -> list[str]:
    """The runtimes at hand, if torch can export to them."""
    found = [name for name in ("onnx", "onnxscript", *RUNTIMES) if importlib.util.find_spec(name) is not None]
    return [name for name in RUNTIMES if {"onnx", "onnxscript", name} <= {*found}]


def export(module: Any, path: Path) -> None:
    """Writes a module (token ids [b, L]) -> [b, D] in float32 as ONNX, for any number of texts and any length."""
    import torch

    example = torch.tensor([[101, 7, 8, 102], [101, 7, 102, 0]])
    sizes = {"tokens": {0: torch.export.Dim("texts"), 1: torch.export.Dim("length")}}
    names = {"input_names": ["tokens"], "output_names": ["embeddings"]}
    torch.onnx.export(module, (example,), str(path), dynamic_shapes=sizes, dynamo=True, verbose=False, **names)


def opened(runtime: str, path: Path) -> Callable[[Any], Any]:
    """The module of an ONNX file, tensor in and tensor out, on as many threads as this process has processors.

    OpenVINO chooses its precision by itself, bfloat16 where the processor has units for it; ONNX Runtime computes as written.
    """
    import torch

    num_threads = len(os.sched_getaffinity(0))
    if runtime == "openvino":
        import openvino

        compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_NUM_THREADS": num_threads})
        return lambda tokens: torch.from_numpy(compiled(tokens.numpy())[0].copy())
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda tokens: torch.from_numpy(session.run(None, {"tokens": tokens.numpy()})[0])
