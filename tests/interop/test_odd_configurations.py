"""Changed settings and arrays: what we load is what transformers loads, or it is refused in one sentence."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from fuzz.edits import ODD_VALUES
from interop import test_architectures as architectures

from de_jax.interop import huggingface
from de_jax.interop.architectures import kind
from de_jax.interop.architectures.kind import Settings
from de_jax.interop.pretrained import stored_arrays
from de_jax.types import InputError

SIZES = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
SIZES |= {"num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}


def config_of(model_type, **changes):
    values = {**SIZES, "model_type": model_type, **changes}
    return kind.kind_of_type("config.json", model_type).config_of(Settings(Path("config.json"), values))


LINEAR = {"rope_type": "linear", "factor": 2.0}
REFUSED = [
    ("mistral", {"sliding_window": 1}, "sliding_window is 1; it must be a whole number, at least 2"),
    ("gemma3_text", {"sliding_window": 1}, "sliding_window is 1; it must be a whole number, at least 2"),
    ("modernbert", {"local_attention": 1}, "local_attention is 1; it must be a whole number, at least 2"),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 5e5}}, "rope_scaling and rope_parameters are both set"),
    (
        "gemma3_text",
        {"rope_scaling": LINEAR, "rope_parameters": {"full_attention": {}}},
        "rope_scaling and rope_parameters are both",
    ),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor is None; it must be a positive number"),
    ("qwen2", {"rope_scaling": {"type": "yarn"}}, "factor is None; it must be a positive number"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None; it must be a positive number"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1}, "rope_theta is 1.0; beside yarn it must be"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED, ids=[f"{kind} {changes}" for kind, changes, _ in REFUSED])
def test_a_configuration_that_transformers_reads_otherwise_is_refused(model_type, changes, message):
    with pytest.raises(InputError, match=rf"config\.json: {message}"):
        config_of(model_type, **changes)


def test_null_and_what_transformers_only_writes_are_read_as_there():
    assert not config_of("llama", is_causal=None).causal  # its masks ask `if not config.is_causal`
    assert config_of("gemma3_text", _sliding_window_pattern=2).global_every == 6
    assert config_of("gemma3_text", sliding_window_pattern=2).global_every == 2


def test_an_array_under_two_names_is_read_where_both_are_equal():
    names = {"bert.pooler.a": 1, "bert.a.LayerNorm.gamma": 2, "a.LayerNorm.weight": 2, "bert.b": 3, "b": 4}
    stored = {name: lambda value=value: np.full(2, value) for name, value in names.items()}
    found = kind.kind_of_type("", "bert").by_own_name("folder", stored)
    assert list(found) == ["pooler.a", "a.LayerNorm.weight", "b"]
    assert found["a.LayerNorm.weight"]().tolist() == [2, 2]
    with pytest.raises(InputError, match=r"^folder: b is stored under two names with different values; remove the wrong one"):
        found["b"]()
    assert kind.kind_of_type("", "t5").own_name("embed_tokens.weight") == "shared.weight"


def test_an_array_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        safetensors.numpy.save_file({"x": np.ones(2, np.float32), name: np.ones(2)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "x": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"b\.safetensors holds x, as another file of .* does; copy all of them again"):
        stored_arrays(tmp_path)


NEIGHBOURS = {
    "rope_scaling": (LINEAR, {"type": "yarn", "factor": 4.0}, {"rope_type": "llama3"}, {"rope_theta": 77.0}),
    "rope_parameters": (
        {"rope_theta": 99.0},
        LINEAR,
        {"full_attention": {"rope_theta": 99.0}},
        {"rope_type": "yarn", "factor": 4.0},
    ),
    "rope_theta": (100.0, 1e6),
    "partial_rotary_factor": (0.5,),
    "layer_types": (["full_attention"] * 4, ["sliding_attention"] * 4, ["full_attention", "sliding_attention"] * 2),
    "hidden_act": ("gelu", "silu", "relu", "gelu_pytorch_tanh"),
    "sliding_window": (1, 2, 5, 16),
    "num_attention_heads": (1, 2, 4),
    "model_type": kind.MODEL_TYPES,
    **dict.fromkeys(("is_causal", "is_decoder", "use_bidirectional_attention", "use_sliding_window"), (True, False, None)),
}
"""Settings that some kinds have and others do not."""
NOTES = re.compile("|".join(kind.HARMLESS.split()))
NUM_CHANGES = 100


def changed_settings(values, rng):
    """One setting dropped, of another value, or added, at the top or within an object."""
    own = [name for name in values if not NOTES.fullmatch(name) or rng.random() < 0.1]
    name = rng.choice([*own, *NEIGHBOURS])
    if isinstance(values.get(name), dict) and values[name] and rng.random() < 0.7:
        return {**values, name: changed_settings(values[name], rng)}
    if name in values and rng.random() < 0.2:
        return {other: value for other, value in values.items() if other != name}
    return {**values, name: rng.choice([*ODD_VALUES, 2, 3, 4, 8, 1e-2, *NEIGHBOURS.get(name, ()) * 5])}


def changed_arrays(arrays, rng):
    """One array gone, or there twice, of another shape, another type or another name."""
    name = rng.choice(sorted(arrays))
    array, rest = arrays[name], {other: array for other, array in arrays.items() if other != name}
    stem = re.sub(r"^\w+\.", "", name)
    changes = [
        rest,
        {**rest, name: np.ascontiguousarray(array.T)},
        {**rest, name: array[..., None]},
        {**rest, name: array.astype(rng.choice(["float16", "float64", "int32"]))},
        {**rest, rng.choice(["", "model.", "bert.", "encoder."]) + stem: array},
        {**arrays, rng.choice(["", "model.", "bert.", "encoder.", "decoder."]) + stem: array + 1},
        {**arrays, name.replace("weight", "gamma"): array + 1},
    ]
    return rng.choice(changes)


def expected(row, folder):
    """Hidden vectors by transformers, or None where it does not load the folder whole."""
    model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    own = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5", "t5gemma": "T5Gemma"}
    name = f"{own[model_type]}EncoderModel" if model_type in own else "AutoModel"
    alone = {"is_encoder_decoder": False} if model_type == "t5gemma" else {}  # its encoder's class asks for this
    try:
        model, report = getattr(transformers, name).from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True, **alone
        )
        if report["mismatched_keys"] or [key for key in report["missing_keys"] if "pooler" not in key]:
            return None
        return architectures.their_hidden(row, model.eval())
    except Exception:
        return None


@pytest.mark.soak
@pytest.mark.parametrize("what", ["settings", "arrays"])
@pytest.mark.parametrize("name", architectures.ROWS)
def test_whatever_is_loaded_gives_the_vectors_of_transformers(tmp_path, monkeypatch, name, what):
    monkeypatch.setattr(architectures, "LENGTHS", (40, 25, 7, 1))
    row, rng = architectures.ROWS[name], random.Random(name)
    architectures.torch_model(row, whole=bool(row.whole)).save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    values, arrays = json.loads(config.read_text()), safetensors.numpy.load_file(weights)
    loaded, sentences = 0, []
    for _ in range(NUM_CHANGES):
        if what == "settings":
            changed = changed_settings(values, rng)
            config.write_text(json.dumps(changed))
        else:
            changed = changed_arrays(arrays, rng)
            safetensors.numpy.save_file(changed, weights, metadata={"format": "pt"})
        try:
            found = huggingface.read(tmp_path)
        except InputError as error:
            sentences.append(str(error))
            continue
        theirs = expected(row, tmp_path)
        if theirs is None or found.query.pad_id != row.pad_id:  # the texts are padded with the row's
            continue
        ours = architectures.our_hidden(row, found, is_packed=False)
        told = {key: value for key, value in changed.items() if value != values.get(key)} if what == "settings" else sorted(changed)
        assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max(), told
        loaded += 1
    assert loaded >= 5
    assert all(str(tmp_path) in sentence and "\n" not in sentence for sentence in sentences)
