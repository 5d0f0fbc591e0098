"""The torch peer: transformers' T5 encoder with our parameters, mean pooling, projection and L2 norm, or a folder's own model.

Imports torch and transformers when a peer is built, so that the benchmarks run without them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from de_jax.interop.fine_tuning import TowerName, pretrained_tokenizer
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.types import Batch, Params


def torch_tower(tower: TowerConfig, parts: dict[str, Any], dtype: str, *, compiled: bool = False) -> Any:
    """A torch module (token ids [b, L]) -> embeddings [b, D] that computes the same as `tower` from the same parameters.

    Args:
        tower: mean pooling over a T5 encoder.
        parts: the tower's parameters by part; copied.
        dtype: of the torch parameters.
        compiled: by torch.compile, for any shape.
    """
    import torch
    from transformers import T5EncoderModel

    class TorchTower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = T5EncoderModel(_torch_config(tower.encoder))
            self.projection = torch.nn.Linear(tower.encoder.model_dim, tower.embedding_dim, bias=False)

        def forward(self, tokens: Any) -> Any:
            mask = tokens != 0
            hidden = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state.float()
            pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
            return torch.nn.functional.normalize(self.projection(pooled.to(self.projection.weight.dtype)).float(), dim=-1)

    module = TorchTower()
    _copy_parameters(module, tower.encoder, jax.device_get(parts))
    module = module.to(torch_device(), getattr(torch, dtype)).eval()
    return torch.compile(module, dynamic=True) if compiled else module


def same_tower(source: str, model: DualEncoder, params: Params, kind: TowerName, dtype: str, *, compiled: bool = False) -> Any:
    """A tower of `model` in torch, `torch_folder` where `source` is a folder and else `torch_tower`."""
    if Path(source).is_dir():
        return torch_folder(source, pretrained_tokenizer(source=source, tower=kind)().pad_id, dtype, compiled=compiled)
    parts = {**params.get("shared", {}), **params.get(kind, {})}
    return torch_tower({"query": model.query, "doc": model.doc}[kind], parts, dtype, compiled=compiled)


def torch_folder(folder: str, pad_id: int, dtype: str, *, compiled: bool = False) -> Any:
    """As `torch_tower`, the model of a folder as sentence-transformers opens it.

    Args:
        folder: the model.
        pad_id: of its own vocabulary; ours has 0 in the place.
        dtype, compiled: as of `torch_tower`.
    """
    import torch
    from sentence_transformers import SentenceTransformer

    class FolderTower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = SentenceTransformer(folder, device=torch_device(), model_kwargs={"dtype": getattr(torch, dtype)})

        def forward(self, tokens: Any) -> Any:
            swapped = torch.where(tokens == 0, pad_id, torch.where(tokens == pad_id, 0, tokens)) if pad_id else tokens
            features = {"input_ids": swapped, "attention_mask": (tokens != 0).long()}
            return self.model(features)["sentence_embedding"].float()

    module = FolderTower().eval()
    return torch.compile(module, dynamic=True) if compiled else module


class TorchStep:
    """A training step in torch over several batches in turn, one shared tower; one call is one pass over all of them.

    Args:
        module: of both sides, float32.
        batches: token ids; cut to each side's longest text, the length after padding to the batch.
        optimizer: "adafactor" or "adamw", torch's own, several parameters at a time.
        loss: "in_batch_softmax" (both directions, summed) or "samtone" (same-tower negatives among the queries).
        temperature: of the loss.
        rates: the learning rate by step, as ours.
        dtype: "bfloat16" for autocast over float32 parameters, or "float32".
    """

    def __init__(
        self,
        module: Any,
        batches: Sequence[Batch],
        *,
        optimizer: str,
        loss: str,
        temperature: float,
        rates: Callable[[int], Any],
        dtype: str,
    ) -> None:
        import torch

        self._module = module.train()
        self._batches = [tuple(_cut(side) for side in (batch.query, batch.doc)) for batch in batches]
        fast = {"fused": True} if optimizer == "adamw" else {"foreach": True}
        make = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}[optimizer]
        self._optimizer = make(self._module.parameters(), lr=float(rates(0)), **fast)
        self._loss, self._temperature, self._dtype = loss, temperature, dtype
        self._rates, self._num_steps = rates, 0

    def __call__(self) -> None:
        import torch

        for batch in self._batches:
            for group in self._optimizer.param_groups:
                group["lr"] = float(self._rates(self._num_steps))
            self._num_steps += 1
            loss = self._loss_of_batch(batch)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
            self._optimizer.step()
            loss.item()  # waits for the device

    def first_loss(self) -> float:
        """The loss of the first batch without dropout."""
        import torch

        with torch.no_grad():
            self._module.eval()
            loss = float(self._loss_of_batch(self._batches[0]))
            self._module.train()
        return loss

    def _loss_of_batch(self, batch: tuple[np.ndarray, ...]) -> Any:
        import torch

        queries, docs = (torch.from_numpy(side).to(torch_device()) for side in batch)
        with torch.autocast(torch_device(), torch.bfloat16, enabled=self._dtype == "bfloat16"):
            embeddings = self._module(queries), self._module(docs)
        return self._loss_of(*embeddings)

    def fit(self) -> int:
        """Halves the batches until a step fits into the device's memory; returns the pairs of a batch."""
        import torch

        while True:
            try:
                self()
                return len(self._batches[0][0])
            except torch.OutOfMemoryError:
                self._batches = [tuple(side[: len(side) // 2] for side in batch) for batch in self._batches]
            self._optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()

    def memory_gib(self) -> float | None:
        """The most memory of the device that torch held; None without a GPU."""
        import torch

        return round(torch.cuda.max_memory_reserved() / 2**30, 3) if torch.cuda.is_available() else None

    def _loss_of(self, query: Any, doc: Any) -> Any:
        import torch

        scores = query @ doc.T / self._temperature
        among_docs = scores
        if self._loss == "samtone":
            same = (query @ query.T / self._temperature).fill_diagonal_(float("-inf"))
            among_docs = torch.cat([scores, same], dim=1)
        own = torch.arange(len(query), device=query.device)
        return torch.nn.functional.cross_entropy(among_docs, own) + torch.nn.functional.cross_entropy(scores.T, own)


def encoder_peer(module: Any) -> tuple[str, Callable[[Sequence[np.ndarray], int], np.ndarray]]:
    """(which peer, function of texts and batch size): sorted by length and padded to each batch's longest text."""
    if importlib.util.find_spec("sentence_transformers") is not None:
        return "sentence-transformers", _sentence_transformer(module)
    return "torch, sorted as sentence-transformers does", lambda texts, batch_size: encode_sorted(module, texts, batch_size)


def pad(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Token ids of some texts, zeros to the right, as wide as the longest; int64 as torch wants them."""
    padded = np.zeros((len(texts), max(map(len, texts))), np.int64)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    return padded


def torch_device() -> str:
    """Where the peer runs."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _cut(tokens: np.ndarray) -> np.ndarray:
    return tokens[:, : int(np.sum(tokens != 0, axis=1).max())].astype(np.int64)


def encode_sorted(module: Callable[[Any], Any], texts: Sequence[np.ndarray], batch_size: int) -> np.ndarray:
    """Embeddings by a function of token ids, the texts sorted by length and padded to the longest of a batch."""
    import torch

    order = np.argsort([-len(text) for text in texts], kind="stable")
    results = []
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            tokens = torch.from_numpy(pad([texts[row] for row in order[start : start + batch_size]]))
            results.append(module(tokens.to(torch_device())).cpu())
    embeddings = torch.cat(results).numpy()
    return embeddings[np.argsort(order)]


def _sentence_transformer(module: Any) -> Callable[[Sequence[np.ndarray], int], np.ndarray]:
    """`SentenceTransformer.encode` over token ids: a text is handed over as one character per token."""
    import torch
    from sentence_transformers import SentenceTransformer

    class FirstModule(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = module

        def preprocess(self, texts: Sequence[str], **unused: Any) -> dict[str, Any]:
            return {"input_ids": torch.from_numpy(pad([np.frombuffer(text.encode("utf-32-le"), np.int32) for text in texts]))}

        def forward(self, features: dict[str, Any], **unused: Any) -> dict[str, Any]:
            return {**features, "sentence_embedding": self.tower(features["input_ids"])}

    model = SentenceTransformer(modules=[FirstModule()], device=torch_device())

    def encode(texts: Sequence[np.ndarray], batch_size: int) -> np.ndarray:
        strings = [text.astype("<u4").tobytes().decode("utf-32-le") for text in texts]
        return model.encode(strings, batch_size=batch_size, show_progress_bar=False)

    return encode


def _torch_config(encoder: T5Config) -> Any:
    from transformers import T5Config as TorchConfig

    return TorchConfig(
        vocab_size=encoder.vocab_size,
        d_model=encoder.model_dim,
        num_layers=encoder.num_layers,
        num_heads=encoder.num_heads,
        d_kv=encoder.head_dim,
        d_ff=encoder.mlp_dim,
        feed_forward_proj=encoder.activation.replace("_", "-"),
        relative_attention_num_buckets=encoder.num_buckets,
        relative_attention_max_distance=encoder.max_distance,
        dropout_rate=encoder.dropout_rate,
    )


def _copy_parameters(module: Any, encoder: T5Config, parts: dict[str, Any]) -> None:
    import torch

    ours = parts["encoder"]
    weights = {
        "projection.weight": parts["projection"]["kernel"].T,
        "encoder.shared.weight": parts["embedder"]["embedding"],
        "encoder.encoder.final_layer_norm.weight": ours["encoder_norm"]["scale"],
        "encoder.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": ours["relpos_bias"]["rel_embedding"].T,
    }
    for i in range(encoder.num_layers):
        layer, prefix = ours[f"layers_{i}"], f"encoder.encoder.block.{i}.layer."
        weights[f"{prefix}0.layer_norm.weight"] = layer["pre_attention_layer_norm"]["scale"]
        weights[f"{prefix}1.layer_norm.weight"] = layer["pre_mlp_layer_norm"]["scale"]
        for name, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
            weights[f"{prefix}0.SelfAttention.{letter}.weight"] = layer["attention"][name]["kernel"].T
        for name, value in layer["mlp"].items():
            weights[f"{prefix}1.DenseReluDense.{name}.weight"] = value["kernel"].T
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
    missing, unexpected = module.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"encoder.encoder.embed_tokens.weight"}:  # the same tensor as encoder.shared
        raise ValueError(f"the peer's parameters differ: missing {missing}, unexpected {unexpected}")
