"""T5 with its decoder (T5ForConditionalGeneration, 1.0, 1.1 and mT5) as transformers saves it, in and out; see `huggingface`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from de_jax.data.text.tokenizing import Tokenizer
from de_jax.files import schema
from de_jax.interop import huggingface
from de_jax.interop.huggingface import CONFIG_FILE, EncoderFolder, encoder_origins
from de_jax.interop.pretrained import Origin, assemble
from de_jax.models.generator import START_ID, Generator
from de_jax.types import InputError, Params

MODEL_TYPES = ("t5", "mt5")
LOGITS = "lm_head.weight"
TABLE = "shared.weight"
COPIES = ("decoder.embed_tokens.weight", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")
"""What older folders hold beside it: the table once more, and a position bias that nothing uses."""


class PretrainedGenerator(NamedTuple):
    """A generator from elsewhere."""

    model: Generator
    params: Params  # float32, numpy
    tokenizer: Tokenizer | None
    max_doc_length: int  # tokens


def read(folder: str | Path) -> PretrainedGenerator:
    """The generator of a folder, such as t5-small's or a docTTTTTquery's.

    Raises:
        InputError: another architecture, files that are missing or damaged, arrays that are missing or have no place.
    """
    folder = Path(folder)
    values = schema.read(folder / CONFIG_FILE, schema.record({}))
    if (kind := values.get("model_type")) not in MODEL_TYPES:
        raise InputError(f"{folder / CONFIG_FILE}: model_type {kind!r} is no generator here; there are {', '.join(MODEL_TYPES)}.")
    opened = huggingface.open_encoder(folder)
    if (pad_id := opened.tokenizer.pad_id if opened.tokenizer else START_ID) != START_ID:
        raise InputError(
            f"{folder}: the vocabulary pads with {pad_id}; a generator's padding is {START_ID}, which queries start with."
        )
    stored = {name: read for name, read in opened.stored.items() if name not in COPIES}
    is_tied = LOGITS not in stored or np.array_equal(stored[LOGITS](), stored[TABLE]())
    if is_tied:
        stored.pop(LOGITS, None)
    # transformers 5 keeps both flags, earlier ones the first alone, which then says whether logits are scaled too.
    is_scaled = values.get("scale_decoder_outputs", values.get("tie_word_embeddings", True) is not False)
    model = Generator(opened.config, _num_decoder_layers(folder, values, opened), is_tied, bool(is_scaled))  # type: ignore[arg-type]
    like = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    params = assemble(str(folder), stored, origins(model), like)
    return PretrainedGenerator(model, params, opened.tokenizer, opened.max_length)


def origins(model: Generator) -> dict[str, Origin]:
    """Where transformers keeps each parameter."""
    found = dict(encoder_origins(model.t5))
    bias = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    found["decoder/relpos_bias/rel_embedding"] = Origin(bias, transposed=True)
    found["decoder/decoder_norm/scale"] = Origin("decoder.final_layer_norm.weight")
    if not model.tied_logits:
        found["decoder/logits_dense/kernel"] = Origin(LOGITS, transposed=True)
    branches = ("wi_0", "wi_1", "wo") if model.t5.activation == "gated_gelu" else ("wi", "wo")
    norms = ("pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm")
    for index in range(model.num_decoder_layers or model.t5.num_layers):
        ours, theirs = f"decoder/layers_{index}", f"decoder.block.{index}.layer"
        for number, name in enumerate(norms):
            found[f"{ours}/{name}/scale"] = Origin(f"{theirs}.{number}.layer_norm.weight")
        for name, place in (("self_attention", "0.SelfAttention"), ("encoder_decoder_attention", "1.EncDecAttention")):
            for part, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
                found[f"{ours}/{name}/{part}/kernel"] = Origin(f"{theirs}.{place}.{letter}.weight", transposed=True)
        for branch in branches:
            found[f"{ours}/mlp/{branch}/kernel"] = Origin(f"{theirs}.2.DenseReluDense.{branch}.weight", transposed=True)
    return found


def _num_decoder_layers(folder: Path, values: Mapping[str, Any], opened: EncoderFolder) -> int:
    number = values.get("num_decoder_layers")
    if number is None:
        return opened.config.num_layers
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= len(opened.stored):
        raise InputError(f"{folder / CONFIG_FILE}: num_decoder_layers is {number!r}; it must be a positive whole number of layers.")
    return number
