"""Text encoders as Hugging Face's transformers saves them: T5 1.0 and 1.1, mT5, umT5, BERT, RoBERTa; transformers is not needed.

config.json                     the architecture and its sizes
model.safetensors               the weights, or several files and model.safetensors.index.json
tokenizer.json / spiece.model   the vocabulary
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.data.text.tokenizing import SENTENCEPIECE_FILE, TOKENIZER_JSON_FILE, Tokenizer, load_tokenizer
from de_jax.files import schema
from de_jax.files.reading import is_there
from de_jax.interop import config_keys, tokenizer_settings
from de_jax.interop.pretrained import Origin, Pretrained, PretrainedSide, assemble
from de_jax.interop.safetensors_files import stored_arrays
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import EncoderConfig, TowerConfig
from de_jax.training.run import model_schema
from de_jax.types import Array, InputError

CONFIG_FILE = "config.json"
DEFAULT_LENGTH = 512
"""Tokens, where the folder does not say what its texts were cut to and the encoder takes any length."""
ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")
ROBERTA_PAD_ID = 1
"""Where config.json does not say."""
T5_TYPES = ("t5", "mt5", "umt5")
MODEL_TYPES = (*T5_TYPES, "bert", *ROBERTA_TYPES)
ACTIVATIONS = {"relu": "relu", "gated-gelu": "gated_gelu"}
DENSE_ACTIVATIONS = {"relu": "relu", "gated-gelu": "gelu_new"}
"""What transformers makes of them, and writes down too."""
POOLING = {"mean": "mean", "cls": "first"}
"""A tower's poolings by the names that the field gives them."""
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
HEADS = (r"(decoder|lm_head|pooler|cls)\..*", r"embeddings\.(position|token_type)_ids")
"""What published encoders carry beside the encoder."""


class EncoderFolder(NamedTuple):
    """An encoder in a folder, whose weights are not read yet."""

    config: T5Config | BertConfig
    tokenizer: Tokenizer | None
    pad_id: int
    max_length: int  # tokens
    stored: dict[str, Callable[[], Array]]
    origins: dict[str, Origin]  # by path within a tower

    @property
    def heads(self) -> list[str]:
        """Patterns of the arrays that an encoder has no place for."""
        return [head for head in HEADS if any(re.fullmatch(head, name) for name in self.stored)]


def read(folder: str | Path, *, ignored: Sequence[str] = (), only_sizes: bool = False, pooling: str | None = None) -> Pretrained:
    """The encoder of a folder as a symmetric dual encoder without a projection, with embeddings of length 1.

    Such a folder tells of an encoder alone; `notes` say what was assumed.

    Args:
        folder: as `save_pretrained` writes it.
        pooling: a name out of `POOLING`; None for "mean".
        ignored: regular expressions of arrays that are left out, beside decoders and heads.
        only_sizes: `params` are shapes, and no weights are read.

    Raises:
        InputError: an unknown architecture, files that are missing or damaged, or arrays that are.
    """
    encoder = open_encoder(Path(folder))
    tower = TowerConfig(encoder.config, pooling=checked_pooling(pooling or "mean"), projection_dim=None)  # type: ignore[arg-type]
    found = pretrained(str(folder), encoder, tower, ignored, only_sizes)
    assumed = f"no projection, embeddings of length 1 and texts of at most {encoder.max_length} tokens"
    if pooling is None:
        assumed = f"mean pooling (pooling=cls takes the first token), {assumed}"
    return found._replace(notes=(f"{folder} holds an encoder alone, so these are assumed: {assumed}",))


def checked_pooling(name: str) -> str:
    """What a tower calls a pooling of `POOLING`.

    Raises:
        InputError: an unknown pooling.
    """
    if name not in POOLING:
        raise InputError(f"pooling is {name!r}; a tower has {' or '.join(POOLING)}.")
    return POOLING[name]


def pretrained(source: str, encoder: EncoderFolder, tower: TowerConfig, ignored: Sequence[str], only_sizes: bool) -> Pretrained:
    """One tower for queries and documents, with the parameters that `encoder` has for it."""
    model = DualEncoder(query=tower, doc=tower)
    params = model.shapes()
    if not only_sizes:
        origins = {f"shared/{path}": origin for path, origin in encoder.origins.items()}
        params = assemble(source, encoder.stored, origins, params, ignored=[*ignored, *encoder.heads])
    side = PretrainedSide(encoder.tokenizer, encoder.max_length, encoder.pad_id)
    return Pretrained(model, params, side, side)


def open_encoder(folder: Path) -> EncoderFolder:
    """The encoder's sizes, vocabulary and the names of its arrays; see `read`."""
    values = schema.read(folder / CONFIG_FILE, schema.record({}))
    config = _encoder_config(folder / CONFIG_FILE, values)
    if adapter := next((name for name in ADAPTERS if (folder / name).exists()), None):
        raise InputError(
            f"{folder / adapter} changes the weights beside it; merge it first, with peft's merge_and_unload and save_pretrained."
        )
    has_tokenizer = any(is_there(folder / name) for name in (SENTENCEPIECE_FILE, TOKENIZER_JSON_FILE))
    tokenizer = load_tokenizer(folder) if has_tokenizer else None
    if tokenizer and tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{folder}: the vocabulary has {tokenizer.vocab_size} entries, but {CONFIG_FILE} says vocab_size {config.vocab_size}."
        )
    pad_id = _pad_id(folder / CONFIG_FILE, values)
    if tokenizer:
        _check_padding(folder / CONFIG_FILE, values, pad_id, tokenizer)
        pad_id = tokenizer.pad_id
    stored = {_canonical(name): read for name, read in stored_arrays(folder).items()}
    if "shared.weight" in stored:
        stored.pop("encoder.embed_tokens.weight", None)  # the same table once more
    elif "encoder.embed_tokens.weight" in stored:
        stored["shared.weight"] = stored.pop("encoder.embed_tokens.weight")
    if config.num_layers > len(stored):  # before a name is made up for each
        raise InputError(f"{folder / CONFIG_FILE} tells of {config.num_layers} layers, but there are only {len(stored)} arrays.")
    longest = config.max_length or DEFAULT_LENGTH
    max_length = min(tokenizer_settings.read(folder).max_length or longest, longest)
    return EncoderFolder(config, tokenizer, pad_id, max_length, stored, encoder_origins(config, pad_id))


def encoder_origins(config: EncoderConfig, pad_id: int = 0) -> dict[str, Origin]:
    """Where transformers keeps the parameters of an encoder, by path within a tower.

    Args:
        config: `T5Config` or `BertConfig`.
        pad_id: the vocabulary's own padding, whose row and row 0 change places.
    """
    return _bert_origins(config, pad_id) if isinstance(config, BertConfig) else _t5_origins(config, pad_id)  # type: ignore[arg-type]


def _encoder_config(file: Path, values: dict[str, Any]) -> T5Config | BertConfig:
    model_type = values.get("model_type")
    if model_type not in MODEL_TYPES:
        raise InputError(f"{file}: model_type {model_type!r} has no tower here; there are {', '.join(MODEL_TYPES)}.")
    is_t5 = model_type in T5_TYPES
    config_of = _t5_config if is_t5 else _bert_config
    config = model_schema.built(file, lambda found: config_of(file, found, model_type), values)
    config_keys.account(file, values, config_keys.T5 if is_t5 else config_keys.BERT)
    return config


def _t5_config(file: Path, values: dict[str, Any], model_type: str) -> T5Config:
    activation = values.get("feed_forward_proj", "relu" if model_type == "t5" else "gated-gelu")
    _require(file, "feed_forward_proj", activation, *ACTIVATIONS)
    _require(file, "dense_act_fn", values.get("dense_act_fn", DENSE_ACTIVATIONS[activation]), DENSE_ACTIVATIONS[activation])
    is_gated = activation == "gated-gelu"
    _require(file, "is_gated_act", values.get("is_gated_act", is_gated), is_gated)
    return T5Config(
        vocab_size=_size(file, values, "vocab_size"),
        model_dim=_size(file, values, "d_model"),
        num_layers=_size(file, values, "num_layers"),
        num_heads=_size(file, values, "num_heads"),
        head_dim=_size(file, values, "d_kv"),
        mlp_dim=_size(file, values, "d_ff"),
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        num_buckets=_size(file, values, "relative_attention_num_buckets", 32),
        max_distance=_size(file, values, "relative_attention_max_distance", 128),
        bias_per_layer=model_type == "umt5",
        dropout_rate=_share(file, values, "dropout_rate"),
        dtype="float32",
    )


def _bert_config(file: Path, values: dict[str, Any], model_type: str) -> BertConfig:
    epsilon = values.get("layer_norm_eps", 1e-12)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise InputError(f"{file}: layer_norm_eps is {epsilon!r}; it must be a small positive number.")
    dropped, of_weights = (_share(file, values, name) for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"))
    return BertConfig(
        vocab_size=_size(file, values, "vocab_size"),
        model_dim=_size(file, values, "hidden_size"),
        num_layers=_size(file, values, "num_hidden_layers"),
        num_heads=_size(file, values, "num_attention_heads"),
        mlp_dim=_size(file, values, "intermediate_size"),
        max_positions=_size(file, values, "max_position_embeddings"),
        position_offset=_pad_id(file, values) + 1 if model_type in ROBERTA_TYPES else 0,
        num_token_types=_size(file, values, "type_vocab_size", 2),
        norm_epsilon=epsilon,
        dropout_rate=dropped,
        attention_dropout_rate=None if of_weights == dropped else of_weights,
        dtype="float32",
    )


def _pad_id(file: Path, values: dict[str, Any]) -> int:
    """The id of padding. RoBERTa counts positions from the one after it, so there it must be right."""
    if values.get("model_type") not in ROBERTA_TYPES:
        pad_id = values.get("pad_token_id")
        return pad_id if isinstance(pad_id, int) else 0
    pad_id = values.get("pad_token_id", ROBERTA_PAD_ID)
    rows = min(_size(file, values, "vocab_size"), _size(file, values, "max_position_embeddings") - 1)
    if not isinstance(pad_id, int) or isinstance(pad_id, bool) or not 0 <= pad_id < rows:
        raise InputError(f"{file}: pad_token_id is {pad_id!r}; it must be a row of both tables that leaves positions for texts.")
    return pad_id


def _check_padding(file: Path, values: dict[str, Any], pad_id: int, tokenizer: Tokenizer) -> None:
    if values["model_type"] in ROBERTA_TYPES and tokenizer.pad_id != pad_id < tokenizer.vocab_size:
        raise InputError(
            f"{file}: pad_token_id is {pad_id}, but the vocabulary pads with {tokenizer.pad_id}; RoBERTa gives the token {pad_id} "
            "no position, so write the vocabulary's id there."
        )


def _t5_origins(config: T5Config, pad_id: int) -> dict[str, Origin]:
    branches = ("wi_0", "wi_1", "wo") if config.activation == "gated_gelu" else ("wi", "wo")
    origins = {
        "embedder/embedding": Origin("shared.weight", swapped_row=pad_id),
        "encoder/encoder_norm/scale": Origin("encoder.final_layer_norm.weight"),
    }
    for index in range(config.num_layers if config.bias_per_layer else 1):
        ours = f"encoder/layers_{index}" if config.bias_per_layer else "encoder"
        name = f"encoder.block.{index}.layer.0.SelfAttention.relative_attention_bias.weight"
        origins[f"{ours}/relpos_bias/rel_embedding"] = Origin(name, transposed=True)
    for index in range(config.num_layers):
        ours, attention, mlp = f"encoder/layers_{index}", f"encoder.block.{index}.layer.0", f"encoder.block.{index}.layer.1"
        origins[f"{ours}/pre_attention_layer_norm/scale"] = Origin(f"{attention}.layer_norm.weight")
        origins[f"{ours}/pre_mlp_layer_norm/scale"] = Origin(f"{mlp}.layer_norm.weight")
        for name, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
            origins[f"{ours}/attention/{name}/kernel"] = Origin(f"{attention}.SelfAttention.{letter}.weight", transposed=True)
        for name in branches:
            origins[f"{ours}/mlp/{name}/kernel"] = Origin(f"{mlp}.DenseReluDense.{name}.weight", transposed=True)
    return origins


def _bert_origins(config: BertConfig, pad_id: int) -> dict[str, Origin]:
    origins = {
        "embedder/embedding": Origin("embeddings.word_embeddings.weight", swapped_row=pad_id),
        "embedder/position/embedding": Origin("embeddings.position_embeddings.weight"),
        "embedder/token_type/embedding": Origin("embeddings.token_type_embeddings.weight"),
    }

    def norm(path: str, name: str) -> None:
        origins[f"{path}/scale"], origins[f"{path}/bias"] = Origin(f"{name}.weight"), Origin(f"{name}.bias")

    def linear(path: str, name: str) -> None:
        origins[f"{path}/kernel"], origins[f"{path}/bias"] = Origin(f"{name}.weight", transposed=True), Origin(f"{name}.bias")

    norm("embedder/norm", "embeddings.LayerNorm")
    for index in range(config.num_layers):
        ours, theirs = f"encoder/layers_{index}", f"encoder.layer.{index}"
        for name in ("query", "key", "value"):
            linear(f"{ours}/attention/{name}", f"{theirs}.attention.self.{name}")
        linear(f"{ours}/attention/out", f"{theirs}.attention.output.dense")
        norm(f"{ours}/attention_layer_norm", f"{theirs}.attention.output.LayerNorm")
        linear(f"{ours}/mlp/wi", f"{theirs}.intermediate.dense")
        linear(f"{ours}/mlp/wo", f"{theirs}.output.dense")
        norm(f"{ours}/mlp_layer_norm", f"{theirs}.output.LayerNorm")
    return origins


def _canonical(name: str) -> str:
    """A name as transformers gives it to an encoder alone today; heads put their encoder's name before it."""
    name = re.sub(r"^(bert|roberta)\.", "", name)
    if re.match(r"(block|final_layer_norm|embed_tokens)\.", name):
        name = f"encoder.{name}"
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))


def _require(file: Path, name: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        raise InputError(f"{file}: {name} is {value!r}; the towers here have {' or '.join(map(repr, allowed))}.")


def _size(file: Path, values: dict[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{file}: {name} is {value!r}; it must be a positive whole number.")
    return value


def _share(file: Path, values: dict[str, Any], name: str) -> float:
    value = values.get(name, 0.1)
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"{file}: {name} is {value!r}; it must be in [0, 1).")
    return float(value)
