"""Runs as folders that sentence-transformers loads; neither it nor torch is needed to write them.

Towers that share everything become one model. Other pairs become the models query/ and document/, each whole in itself, and the
folder above is a Router over both, for `encode_query` and `encode_document`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from de_jax.data.text.tokenizing import with_prompt
from de_jax.files.outputs import write_json
from de_jax.interop import tokenizer_files, tokenizer_settings
from de_jax.interop.huggingface import CONFIG_FILE, encoder_origins
from de_jax.interop.pretrained import Origin, disassemble
from de_jax.interop.safetensors_files import FILE, save
from de_jax.interop.sentence_transformers import IDENTITY, LENGTH_FILE, MODULES_FILE, PROMPTS_FILE
from de_jax.models.bert import BertConfig
from de_jax.models.t5 import NORM_EPSILON
from de_jax.models.tower import TowerConfig
from de_jax.training.run.run_folder import Run
from de_jax.types import Params

NAMES = {"query": "query", "doc": "document"}
MODULE = "sentence_transformers.models."  # where every version finds its modules
POSITIONS = "embeddings.position_embeddings.weight"
ACTIVATIONS = {"relu": "relu", "gated_gelu": "gated-gelu"}


def write(folder: Path, run: Run) -> None:
    """Writes a run into an existing folder; `SentenceTransformer(folder)` gives its embeddings.

    Where one model serves texts of two lengths, queries are cut by `encode_query`, which needs sentence-transformers 6.
    """
    prompts = {name: run.side(tower).prompt for tower, name in NAMES.items() if run.side(tower).prompt}
    if _is_one_model(run):
        _write_model(folder, run, "doc", prompts, None)
        if run.query.max_length != run.doc.max_length:
            lengths = {"max_seq_length": run.doc.max_length, "query_length": run.query.max_length}
            write_json(folder / LENGTH_FILE, lengths)
        return
    types: dict[str, str] = {}
    structure: dict[str, list[str]] = {}
    for tower, name in NAMES.items():
        own = {name: prompts[name]} if name in prompts else {}
        (folder / name).mkdir()
        modules = _write_model(folder / name, run, tower, own, name if own else None)
        places = [f"{name}/{module['path']}".rstrip("/") for module in modules]
        types.update(zip(places, (module["type"] for module in modules), strict=True))
        structure[name] = places
    parameters = {"default_route": "document", "allow_empty_key": True}
    write_json(folder / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})
    write_json(folder / MODULES_FILE, [{"idx": 0, "name": "0", "path": "", "type": f"{MODULE}Router"}])
    _write_prompts(folder, run.model.doc, prompts, None)


def _is_one_model(run: Run) -> bool:
    vocabularies = {with_prompt(tokenizer, "").fingerprint for tokenizer in (run.query.tokenizer, run.doc.tokenizer)}
    return set(run.params) == {"shared"} and run.model.query == run.model.doc and len(vocabularies) == 1


def _write_model(folder: Path, run: Run, tower: str, prompts: dict[str, str], default_prompt: str | None) -> list[dict[str, Any]]:
    """One tower as a model; gives its modules.json."""
    config = {"query": run.model.query, "doc": run.model.doc}[tower]
    params = {**run.params.get("shared", {}), **run.params.get(tower, {})}
    side = run.side(tower)
    tokenizer, max_length = with_prompt(side.tokenizer, ""), side.max_length
    encoder = {part: params[part] for part in ("embedder", "encoder")}
    arrays = disassemble(encoder, encoder_origins(config.encoder, tokenizer.pad_id))
    if isinstance(config.encoder, BertConfig):
        values, unused = _bert_json(config.encoder, tokenizer.pad_id)
        arrays[POSITIONS] = arrays[POSITIONS][unused:]
    else:
        values = _t5_json(config.encoder, tokenizer.pad_id)
    save(folder / FILE, arrays)
    write_json(folder / CONFIG_FILE, values)
    tokenizer_files.write(folder, tokenizer, max_length)
    for prompt in prompts.values():
        tokenizer_settings.check_prompt(run.run_dir, folder, prompt)
    write_json(folder / LENGTH_FILE, {"max_seq_length": max_length})
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{MODULE}Transformer"}]
    for kind, values, arrays in _heads(config, params):
        index = len(modules)
        modules.append({"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": f"{MODULE}{kind}"})
        write_json(folder / f"{index}_{kind}" / CONFIG_FILE, values)
        if arrays:
            save(folder / f"{index}_{kind}" / FILE, arrays)
    write_json(folder / MODULES_FILE, modules)
    _write_prompts(folder, config, prompts, default_prompt)
    return modules


def _heads(config: TowerConfig, params: Params) -> list[tuple[str, dict[str, Any], dict[str, np.ndarray]]]:
    """Class, settings and arrays of what follows the encoder."""
    dim, pooled_dim = config.embedding_dim, config.encoder.model_dim
    modes = {"pooling_mode_mean_tokens": config.pooling == "mean", "pooling_mode_cls_token": config.pooling == "first"}
    heads: list[tuple[str, dict[str, Any], dict[str, np.ndarray]]] = [
        ("Pooling", {"word_embedding_dimension": pooled_dim, **modes}, {})
    ]
    if config.projection_dim:
        projection = dict(params["projection"])
        norm = projection.pop("norm", None)
        origins = {"kernel": Origin("linear.weight", transposed=True), "bias": Origin("linear.bias")}
        settings = {"in_features": pooled_dim, "out_features": dim, "bias": config.projection_bias, "activation_function": IDENTITY}
        heads.append(("Dense", settings, disassemble(projection, origins)))
        if norm:
            origins = {"scale": Origin("norm.weight"), "bias": Origin("norm.bias")}
            heads.append(("LayerNorm", {"dimension": dim}, disassemble(norm, origins)))
    if config.normalize:
        heads.append(("Normalize", {}, {}))
    return heads


def _write_prompts(folder: Path, config: TowerConfig, prompts: dict[str, str], default: str | None) -> None:
    similarity = "cosine" if config.normalize else "dot"
    settings = {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": similarity}
    write_json(folder / PROMPTS_FILE, settings)


def _t5_json(config: Any, pad_id: int) -> dict[str, Any]:
    """What transformers calls the sizes of a T5 encoder whose vocabulary pads with `pad_id`."""
    model_type = "umt5" if config.bias_per_layer else "t5"
    return {
        "model_type": model_type,
        "architectures": [f"{model_type.upper()}EncoderModel"],
        "vocab_size": config.vocab_size,
        "d_model": config.model_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "feed_forward_proj": ACTIVATIONS[config.activation],
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": NORM_EPSILON,
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": pad_id,
        "eos_token_id": 1,
        "dtype": "float32",
    }


def _bert_json(config: BertConfig, pad_id: int) -> tuple[dict[str, Any], int]:
    """(what transformers calls the sizes of an encoder, rows to leave out at the start of its position table).

    transformers counts RoBERTa's positions from pad_id + 1. Where ours begin elsewhere, the model is a BERT of the rows in use.
    """
    is_roberta = config.position_offset == pad_id + 1
    model_type, name = ("roberta", "Roberta") if is_roberta else ("bert", "Bert")
    unused = 0 if is_roberta else config.position_offset
    values = {
        "model_type": model_type,
        "architectures": [f"{name}Model"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_positions - unused,
        "type_vocab_size": config.num_token_types,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.weights_dropout_rate,
        "layer_norm_eps": config.norm_epsilon,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }
    return values, unused
