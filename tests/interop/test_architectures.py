"""Every kind of encoder against transformers, in and out: one row for each odd configuration, random weights, hidden vectors."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import torch
import transformers
from pretrained_folders import TEXTS, WORDS, our_embeddings, write, write_tokenizer

from de_jax import cli, command
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import Side
from de_jax.interop import any_model, huggingface, peft_adapters
from de_jax.interop.architectures import kind, rotary
from de_jax.interop.architectures.kind import Settings
from de_jax.interop.export import export
from de_jax.interop.pretrained import Origin, disassemble, part_of, save
from de_jax.models.rotary import RotaryConfig
from de_jax.models.tower import segments_of
from de_jax.training.optim import paths
from de_jax.training.run import run_log
from de_jax.training.run.run_folder import Run, load_run
from de_jax.training.step.adapters import Lora
from de_jax.types import InputError

LENGTHS = (140, 60, 7, 1)  # tokens: beyond T5's and MPNet's farthest bucket and all windows below
PACKED = ((140, 0, 0), (60, 7, 1), (0, 0, 0), (0, 0, 0))
VOCAB_SIZE = 61
T5 = {"d_model": 32, "num_layers": 2, "num_heads": 3, "d_kv": 8, "d_ff": 48}
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 160,
}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 141}
MODERN = {**BERT, "num_hidden_layers": 4, "local_attention": 16}
LLAMA = {**BERT, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
GEMMA = {**LLAMA, "num_hidden_layers": 4, "sliding_window": 16, "query_pre_attn_scalar": 24, "hidden_size": 36}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64}  # fmt: skip
T5_GEMMA = {**GEMMA, "sliding_window": 9, "vocab_size": VOCAB_SIZE}
VISION = {"model_type": "siglip_vision_model", "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 1, "image_size": 16, "patch_size": 1}  # fmt: skip
T5_GEMMA2 = {**T5_GEMMA, "sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
LEFT_OUT = re.compile(r".*pooler.*|.*(vision_tower|multi_modal_projector)\..*|decoder\.norm\.weight")
"""Arrays of transformers' models that no encoder of texts has."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration: transformers' classes begin with `name`."""

    name: str
    settings: dict[str, Any]
    refused: dict[str, Any]  # a neighbour's setting
    suffix: str = "Model"
    whole: str = ""  # the suffix of a model with heads, whose encoder it is
    dtype: str = "float32"
    shard: str = "1GB"
    exported: str = ""  # the name of what it is saved as, where that differs
    pad_id: int = 0
    is_soaked: bool = False  # a configuration whose parts other rows have
    named: str = ""  # what is refused, where that is not `refused`'s own name


ROWS = {
    "t5 1.0, sharded": Row("T5", {**T5, "feed_forward_proj": "relu"}, {"feed_forward_proj": "gated-silu"}, "EncoderModel",
        shard="9kB"),
    "t5 with a decoder, padding 4": Row("T5", {**T5, "pad_token_id": 4, "relative_attention_num_buckets": 12},
        {"layer_norm_epsilon": 1e-5}, "EncoderModel", "ForConditionalGeneration", pad_id=4),
    "mt5, bfloat16": Row("MT5", T5, {"is_gated_act": False}, "EncoderModel", dtype="bfloat16", exported="T5"),
    "umt5": Row("UMT5", T5, {"dense_act_fn": "silu"}, "EncoderModel"),
    "bert with heads, float16": Row("Bert", BERT, {"hidden_act": "relu"}, whole="ForPreTraining", dtype="float16"),
    "roberta, padding 5": Row("Roberta", {**BERT, "pad_token_id": 5, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        {"position_embedding_type": "relative_key"}, whole="ForMaskedLM", pad_id=5),
    "xlm-roberta": Row("XLMRoberta", {**BERT, "pad_token_id": 1}, {"is_decoder": True}, exported="Roberta", pad_id=1),
    "mpnet with heads": Row("MPNet", BERT, {"pad_token_id": 0}, whole="ForMaskedLM", pad_id=1),
    "mpnet, bfloat16 in shards": Row("MPNet", {**BERT, "num_attention_heads": 2}, {"relative_attention_num_buckets": 16},
        dtype="bfloat16", shard="9kB", pad_id=1),
    "distilbert with heads, padding 3": Row("DistilBert", {**DISTIL, "pad_token_id": 3}, {"activation": "relu"},
        whole="ForMaskedLM", pad_id=3),
    "modernbert": Row("ModernBert", {**MODERN, "pad_token_id": 60}, {"hidden_activation": "relu"}, pad_id=60),
    "modernbert with heads, biases, every second layer global, float16": Row("ModernBert",
        {**MODERN, "pad_token_id": 7, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "local_attention": 9,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]},
        whole="ForMaskedLM", dtype="float16", pad_id=7),
    "qwen3 with an untied head": Row("Qwen3", {**LLAMA, "tie_word_embeddings": False}, {"use_sliding_window": True},
        whole="ForCausalLM"),
    "qwen3, biases, padding 9, bfloat16 in shards": Row("Qwen3", {**LLAMA, "attention_bias": True, "pad_token_id": 9,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "longrope", "factor": 2.0}}, dtype="bfloat16", shard="9kB", pad_id=9),
    "gemma3 with a tied head": Row("Gemma3", {**GEMMA, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {"attn_logit_softcapping": 50.0}, "TextModel", "ForCausalLM"),
    "gemma3 embedding": Row("Gemma3", {**GEMMA, "use_bidirectional_attention": True, "sliding_window": 14, "rope_parameters": {
        "full_attention": {"rope_theta": 1e5, "rope_type": "linear", "factor": 4.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}, "num_key_value_heads": 6},
        {"hidden_activation": "silu"}, "TextModel"),
    "nomic with heads, padding 4": Row("NomicBert", {**BERT, "pad_token_id": 4}, {"hidden_act": "relu"}, whole="ForMaskedLM",
        pad_id=4),
    "gte, bfloat16": Row("Gte", {**BERT, "type_vocab_size": 0, "hidden_act": "silu"}, {"rope_parameters": {"rope_theta": 1e4,
        "rope_type": "dynamic", "factor": 2.0}}, dtype="bfloat16", pad_id=1),
    "gte with heads, yarn": Row("Gte", {**BERT, "rope_parameters": YARN}, {"rope_parameters": {**YARN, "truncate": False}},
        whole="ForMaskedLM", pad_id=1),
    "eurobert with an untied head, padding 60": Row("EuroBert", {**LLAMA, "hidden_size": 36, "pad_token_id": 60, "mlp_bias": True,
        "mask_token_id": 3}, {"hidden_act": "gelu"}, whole="ForMaskedLM", pad_id=60),
    "llama 3 with a tied head, float16": Row("Llama", {**LLAMA, "hidden_size": 36, "attention_bias": True,
        "rope_parameters": LLAMA3, "tie_word_embeddings": True}, {"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}},
        whole="ForCausalLM", dtype="float16"),
    "llama in both directions, linear": Row("Llama", {**LLAMA, "hidden_size": 36, "is_causal": False, "pad_token_id": 2,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}}, {"is_causal": 1}, exported="EuroBert",
        pad_id=2, is_soaked=True),
    "mistral, a window": Row("Mistral", {**LLAMA, "sliding_window": 16}, {"rope_parameters": YARN}, whole="ForCausalLM"),
    "mistral without a window": Row("Mistral", {**LLAMA, "sliding_window": None, "hidden_size": 36}, {"sliding_window": 0},
        exported="Llama", is_soaked=True),
    "qwen2": Row("Qwen2", {**BERT, "num_key_value_heads": 2}, {"use_sliding_window": True}, whole="ForCausalLM",
        is_soaked=True),
    "qwen2 in both directions, yarn": Row("Qwen2", {**BERT, "num_key_value_heads": 4, "is_causal": False,
        "rope_parameters": YARN, "pad_token_id": 8}, {"rope_parameters": {**YARN, "attention_factor": 1.0}}, shard="9kB",
        pad_id=8, named="attention_factor"),
    "t5gemma": Row("T5Gemma", {"encoder": T5_GEMMA, "decoder": T5_GEMMA, "is_encoder_decoder": False},
        {"encoder": {**T5_GEMMA, "hidden_activation": "relu"}}, "EncoderModel", named="hidden_activation"),
    "t5gemma with a decoder, bfloat16": Row("T5Gemma", {"encoder": {**T5_GEMMA, "attn_logit_softcapping": None,
        "layer_types": ["full_attention"] * 4, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}},
        "decoder": T5_GEMMA}, {"encoder": {**T5_GEMMA, "num_experts": 4}}, "EncoderModel", "ForConditionalGeneration",
        dtype="bfloat16", named="num_experts"),
    "t5gemma2": Row("T5Gemma2", {"encoder": {"text_config": T5_GEMMA2, "vision_config": VISION, "eoi_token_index": 5},
        "decoder": T5_GEMMA2}, {"encoder": {"text_config": {**T5_GEMMA2, "attn_logit_softcapping": 50.0}}},
        named="attn_logit_softcapping"),
    "t5gemma2 for generation, one key of a window, padding 7, bfloat16 in shards": Row("T5Gemma2", {"encoder": {"text_config": {
        **T5_GEMMA2, "sliding_window": 2, "attention_bias": True, "pad_token_id": 7,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {"full_attention": {"rope_theta": 1e5, "rope_type": "linear", "factor": 8.0}}}, "vision_config": VISION,
        "eoi_token_index": 60}, "decoder": {**T5_GEMMA2, "pad_token_id": 7}}, {"encoder": {"eoi_token_id": 60}},
        whole="ForConditionalGeneration", dtype="bfloat16", shard="9kB", pad_id=7, named="eoi_token_id"),
}  # fmt: skip


def torch_model(row, *, whole=False, vocab_size=VOCAB_SIZE):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config_of = getattr(transformers, f"{row.name}TextConfig" if row.suffix == "TextModel" else f"{row.name}Config")
    is_t5 = row.name.endswith("T5")
    config = config_of(vocab_size=vocab_size, **({"decoder_start_token_id": 0} if is_t5 else {}), **row.settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, row.name + (row.whole if whole else row.suffix))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms of ones and biases of zeros would hide a missing one, and kernels near 0 what attention sees.
            noise = torch.rand_like(parameter) - 0.5 if parameter.ndim == 1 else torch.randn_like(parameter) * 0.2
            parameter.copy_((parameter + noise).to(getattr(torch, row.dtype)))
    return model.eval()


def encoder_of(row, model):
    if row.name in ("T5", "MT5", "UMT5", "T5Gemma", "T5Gemma2"):
        return getattr(model, "transformer", model).get_encoder()
    return getattr(model, model.base_model_prefix, model)


def tokens_of(row):
    """Ids in rows of one text each, padded as the vocabulary has it."""
    rng = np.random.default_rng(0)
    ids = np.setdiff1d(np.arange(VOCAB_SIZE), [row.pad_id])
    tokens = np.full((len(LENGTHS), max(LENGTHS)), row.pad_id)
    for line, length in zip(tokens, LENGTHS, strict=True):
        line[:length] = rng.choice(ids, length)
    return tokens, np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]


def their_hidden(row, model):
    tokens, mask = tokens_of(row)
    with torch.no_grad():
        return encoder_of(row, model)(input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()[
            mask
        ]


@functools.partial(jax.jit, static_argnums=0)
def hidden_of(config, params, tokens, segments):
    x = config.embedder().apply({"params": params["embedder"]}, tokens, segments, True)
    return config.encoder().apply({"params": params["encoder"]}, x, segments, True)


def our_hidden(row, found, *, is_packed):
    """The vectors of all tokens, text by text."""
    tokens, mask = tokens_of(row)
    ours = np.where(tokens == row.pad_id, 0, np.where(tokens == 0, row.pad_id, tokens)).astype(np.int32)
    segments = mask.astype(np.int32)
    if is_packed:
        flat, ours = ours[mask], np.zeros_like(ours)
        segments = np.array(segments_of(np.array(PACKED), max(LENGTHS)))
        ours[segments > 0] = flat
    config = dataclasses.replace(found.model.query.encoder, scan_layers=True)
    return np.asarray(hidden_of(config, found.params["shared"], ours, segments))[segments > 0]


def close(actual, expected, record_property):
    scale = np.abs(expected).max()
    record_property("difference", f"{np.abs(actual - expected).max() / scale:.1e}")  # of docs/checkpoints.md
    np.testing.assert_allclose(actual / scale, expected / scale, atol=1e-5)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.soak] * row.is_soaked) for name, row in ROWS.items()])
def imported(request, tmp_path_factory):
    """A row, its folder, what transformers makes of texts, and our import."""
    row = ROWS[request.param]
    folder = tmp_path_factory.mktemp("architectures") / "model"
    model = torch_model(row, whole=bool(row.whole))
    copy.deepcopy(model).to(getattr(torch, row.dtype)).save_pretrained(folder, max_shard_size=row.shard)  # buffers are rounded too
    assert (folder / "model.safetensors.index.json").exists() == (row.shard != "1GB")
    return row, folder, their_hidden(row, model), huggingface.read(folder)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_hidden_vectors_are_those_of_transformers(imported, is_packed, record_property):
    row, _, expected, found = imported
    close(our_hidden(row, found, is_packed=is_packed), expected, record_property)


def test_what_is_written_is_loaded_by_transformers_and_by_us_as_it_was(imported, tmp_path, record_property):
    row, _, expected, found = imported
    config, params = found.model.query.encoder, found.params["shared"]
    own = kind.kind_of(config, row.pad_id)
    save(tmp_path / "model.safetensors", disassemble(params, own.origins_of(config, row.pad_id)))
    (tmp_path / "config.json").write_text(json.dumps(own.json_of(config, row.pad_id)))
    model = getattr(transformers, (row.exported or row.name) + row.suffix)
    theirs, report = model.from_pretrained(tmp_path, attn_implementation="eager", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not [key for key in report["missing_keys"] if not LEFT_OUT.fullmatch(key)]
    close(their_hidden(row, theirs.eval()), expected, record_property)
    again = huggingface.read(tmp_path)
    assert again.model == found.model
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again.params["shared"], params)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *[("bert with heads, float16", f"For{task}") for task in ("SequenceClassification", "QuestionAnswering", "MultipleChoice")],
        ("roberta, padding 5", "ForTokenClassification"),
        ("mpnet with heads", "ForSequenceClassification"),
        ("distilbert with heads, padding 3", "ForQuestionAnswering"),
        ("qwen2", "ForQuestionAnswering"),
        ("t5 with a decoder, padding 4", "ForSequenceClassification"),
        ("umt5", "ForQuestionAnswering"),
    ],
)
def test_the_heads_of_other_tasks_are_left_out(name, head, tmp_path, record_property):
    row = dataclasses.replace(ROWS[name], whole=head, dtype="float32")
    model = torch_model(row, whole=True)
    model.save_pretrained(tmp_path / "model")
    found = huggingface.read(tmp_path / "model")
    close(our_hidden(row, found, is_packed=False), their_hidden(row, model), record_property)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.name == "T5Gemma2"])
def test_the_texts_of_t5gemma2_hold_the_token_with_a_vector_of_its_own(name):
    assert ROWS[name].settings["encoder"]["eoi_token_index"] in tokens_of(ROWS[name])[0]


OFTEN = "modernbert"
"""The kind that keeps three of our kernels as one."""


@pytest.mark.parametrize(
    "imported", [name if name == OFTEN else pytest.param(name, marks=pytest.mark.soak) for name in ROWS], indirect=True
)
def test_adapters_are_loaded_by_peft_and_by_us_and_give_the_same(imported, tmp_path, record_property):
    import peft

    row, folder, expected, found = imported
    config, params = found.model.query.encoder, found.params
    adapters = Lora(pattern=r".*/(layers_0/attention/value|attention/query|mlp/w(i|i_0|o))/kernel", rank=3, alpha=4.5)
    trained, _ = adapters.split(adapters.added_to(params, jax.random.key(0)))
    rng = np.random.default_rng(0)
    leaves = {path: np.asarray(leaf) for path, leaf in paths.by_path(trained).items()}
    leaves |= {path: rng.normal(size=leaf.shape).astype(np.float32) / 5 for path, leaf in leaves.items() if "lora_b" in path}
    (tmp_path / "out").mkdir()
    own = {path.removeprefix("shared/"): leaf for path, leaf in leaves.items()}
    if row.name in ("NomicBert", "Gte", "T5Gemma2"):
        with pytest.raises(InputError, match=r"peft finds no kernel of .* by the name it has in a file; export the model with"):
            peft_adapters.write_encoder(tmp_path / "out", config, row.pad_id, adapters, own, str(folder))
        return
    peft_adapters.write_encoder(tmp_path / "out", config, row.pad_id, adapters, own, str(folder))
    merged = found._replace(params=adapters.merged(paths.tree_of({**paths.by_path(params), **leaves})))
    ours = our_hidden(row, merged, is_packed=False)
    bare = "Model" if row.whole == "ForConditionalGeneration" else row.suffix
    model = getattr(transformers, row.name + bare).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    peft.PeftModel.from_pretrained(model, tmp_path / "out").eval()  # it changes the model itself
    close(ours, their_hidden(row, model), record_property)
    assert np.abs(ours - expected).max() > 0.1 * np.abs(expected).max()
    again = any_model.read(tmp_path / "out")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again.params, dict(merged.params))


def changed(folder, to, **values):
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **values}))
    for file in folder.glob("model*"):
        (to / file.name).symlink_to(file)
    return to


def test_a_neighbour_is_refused_in_one_sentence(imported, tmp_path):
    row, folder, _, _ = imported
    name = row.named or next(iter(row.refused)).split("_param")[0]
    with pytest.raises(InputError, match=rf"config\.json: .*{name}") as error:
        huggingface.read(changed(folder, tmp_path, **row.refused), only_sizes=True)
    assert "\n" not in str(error.value)


def test_a_setting_that_transformers_ignores_is_left_out_and_told(imported, tmp_path):
    _, folder, _, found = imported
    again = huggingface.read(changed(folder, tmp_path, a_setting=1), only_sizes=True)
    assert again.model == found.model
    assert "config.json: a_setting left out, as transformers ignores it for" in again.notes[0]


def test_an_array_without_a_place_is_refused_by_name(imported, tmp_path):
    _, folder, _, _ = imported
    changed(folder, tmp_path)
    file = min(tmp_path.glob("model*.safetensors"))
    arrays = {**safetensors.numpy.load_file(file), "layers.9.norm": np.ones(2, np.float32)}
    file.unlink()
    safetensors.numpy.save_file(arrays, file)
    index = tmp_path / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text())
        shards["weight_map"]["layers.9.norm"] = file.name
        index.unlink()
        index.write_text(json.dumps(shards))
    with pytest.raises(
        InputError, match=r"holds 1 arrays that the model has no place for: layers\.9\.norm; if they are not wanted, name them"
    ):
        huggingface.read(tmp_path)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"layer_types": [["full_attention"]] * 2}, "layer_types is not a list of 2 times"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*; it must be a positive number"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5; it must be at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "read the type in rope_scaling differently; name it rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor is nan; it must be a positive number"),
    ],
)
def test_settings_that_versions_or_machines_read_differently_are_refused(values, sentence):
    settings = Settings(Path("config.json"), values)
    with pytest.raises(InputError, match=rf"^config\.json: .*{sentence}"):
        _ = rotary.rope(settings, rotary.GLOBAL, "rope_theta", 1e6, "linear"), rotary.global_layers(settings, 2, (1, 0))


def test_a_fused_array_with_one_part_only_is_refused_although_it_has_the_shape_of_a_parameter():
    with pytest.raises(InputError, match=r"^model: qkv has the shape \(32, 32\); 3 parameters of equal size do not fit into it\.$"):
        part_of(np.zeros((32, 32)), Origin("qkv", part=(0, 3)), "model")


def qwen_vocabulary():
    pieces = ("[UNK]", "<|endoftext|>", "<|fim_pad|>", *WORDS)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "[UNK]"))
    tokenizer.add_special_tokens(list(pieces[1:3]))
    return tokenizer, "$A <|endoftext|>", {"pad_token": "<|endoftext|>"}


def mistral_vocabulary():
    """No token is for padding, and bytes stand for what is unknown."""
    pieces = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(set("".join(WORDS))))
    bpe = tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.add_special_tokens(list(pieces[:3]))
    flags = {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    return tokenizer, "<s> $A </s>", {"pad_token": "</s>", **flags}


PADDING_WITH_THE_END = {  # row, vocabulary, and the ids before, after and beside texts
    "qwen3-embedding": ("qwen3 with an untied head", qwen_vocabulary, (), (1,), 2),
    "e5-mistral": ("mistral, a window", mistral_vocabulary, (1,), (2,), 0),
}


@pytest.fixture(scope="module", params=PADDING_WITH_THE_END)
def embedding_model(request, tmp_path_factory):
    """A text ends with the token that also pads, on the left, and the last token is the embedding."""
    folder = tmp_path_factory.mktemp("embedding") / "model"
    row, vocabulary, *ids = PADDING_WITH_THE_END[request.param]
    tokenizer, template, settings = vocabulary()
    torch_model(ROWS[row], vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    around = [(piece, tokenizer.token_to_id(piece)) for piece in template.split() if piece != "$A"]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=around)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **settings).save_pretrained(folder)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    values = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
              for i, (kind, path) in enumerate(modules)]  # fmt: skip
    write(folder / "modules.json", values)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 24})
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "query : "}})
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True})
    return folder, *ids


def test_the_last_token_of_texts_that_end_with_the_padding_is_embedded(embedding_model, tmp_path):
    folder, before, after, pad_id = embedding_model
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    found = any_model.read(folder)
    tokenizer = found.doc.tokenizer
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.pad_id) == (before, after, pad_id)
    expected = model.encode_query(TEXTS), model.encode_document(TEXTS)
    for tower, vectors in zip(("query", "doc"), expected, strict=True):
        np.testing.assert_allclose(our_embeddings(found, TEXTS, tower), vectors, atol=1e-5)
    sides = [Side(side.tokenizer, side.max_length) for side in (found.query, found.doc)]
    export(Run(tmp_path, 0, found.model, found.params, *sides), tmp_path / "out", "sentence_transformers")
    again = library.SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    np.testing.assert_allclose(again.encode_query(TEXTS), expected[0], atol=1e-5)
    np.testing.assert_allclose(again.encode_document(TEXTS), expected[1], atol=1e-5)


def test_a_causal_encoder_alone_is_pooled_by_its_last_token(embedding_model, tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).symlink_to(embedding_model[0] / name)
    found = any_model.read(tmp_path / "model", only_sizes=True)
    assert found.model.doc.pooling == "last"
    assert "assumed: lasttoken pooling" in found.notes[0]


def test_an_encoder_that_transformers_does_not_have_is_refused_before_it_is_written():
    config = RotaryConfig(causal=True)  # ModernBERT sees later tokens
    with pytest.raises(InputError, match=r"transformers has no model \(t5.*t5gemma2\) for a RotaryConfig with these settings"):
        kind.kind_of(config, 0)
    assert kind.kind_of(RotaryConfig(dtype="bfloat16", scan_layers=True), 0).model_types == ("modernbert",)


def dataset_of_known_words(folder):
    """Texts that differ in the vocabularies of these tests: equal ones are one text to a batch."""
    pairs = [(f"{first} {second}", f"{second} {first} of {second}") for first in WORDS for second in WORDS if first != second]
    docs = [(f"d{i}", "", doc) for i, (_, doc) in enumerate(pairs)]
    queries = [(f"q{i}", query) for i, (query, _) in enumerate(pairs)]
    qrels = {name: {f"q{i}": {f"d{i}": 1} for i in rows} for name, rows in (("train", range(80)), ("dev", range(80, 90)))}
    beir.write(folder, docs, queries, qrels)
    return folder


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [
        ("mpnet with heads", "roberta"),
        ("distilbert with heads, padding 3", "bert"),
        ("modernbert", "bert"),
        ("nomic with heads, padding 4", "bert"),
        ("gte with heads, yarn", "bert"),
        ("eurobert with an untied head, padding 60", "bert"),
        ("llama 3 with a tied head, float16", "bert"),
        ("mistral, a window", "bert"),
        ("qwen2", "qwen2"),
        ("qwen3 with an untied head", "bert"),
        ("t5gemma", "bert"),
        ("t5gemma2", "bert"),
        ("gemma3 embedding", "bert"),
    ],
)
def test_a_fine_tuning_that_is_stopped_goes_on_to_the_same_end(tmp_path, monkeypatch, name, vocabulary):
    torch_model(ROWS[name], vocab_size=320 if vocabulary == "qwen2" else VOCAB_SIZE).save_pretrained(tmp_path / "model")
    if vocabulary == "qwen2":  # its class reads no other kind of vocabulary
        transformers.Qwen2Tokenizer(pad_token="<pad>").train_new_from_iterator(TEXTS, 320).save_pretrained(tmp_path / "model")
    else:
        write_tokenizer(tmp_path / "model", vocabulary)
    settings = {
        "MODEL": tmp_path / "model",
        "beir_pairs.dataset_dir": dataset_of_known_words(tmp_path / "data"),
        "make_mesh.data": 1,
    }
    settings |= {"PairsOptions.batch_size": 16, "PairsOptions.max_query_length": 16, "PairsOptions.max_doc_length": 32}
    settings |= {"Optimization.num_steps": 6, "Logging.log_every_steps": 1, "Logging.save_every_steps": 6, "linear.warmup_steps": 0}
    settings |= {"Optimization.learning_rate": 0.001, "pretrained_tower.scan_layers": True, "pretrained_tower.remat": "'full'"}
    settings |= {"pretrained_tower.projection_dim": 8, "Initialization.init_new": "('shared/projection/.*',)"}
    argv = ["--gin_file=recipes/fine_tune.gin", *(f"--gin.{name}={value}" for name, value in settings.items())]
    cli.call("train", [*argv, f"--run_dir={tmp_path / 'whole'}"])
    stop = lambda step, scalars: os.kill(os.getpid(), signal.SIGTERM) if step == 3 and "loss" in scalars else None  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(run_log, "progress_sink", lambda *_: contextlib.nullcontext(stop))
        with pytest.raises(SystemExit):
            command.run(lambda: cli.call("train", [*argv, f"--run_dir={tmp_path / 'stopped'}"]))
    assert load_run(tmp_path / "stopped").step < 6
    cli.call("train", [*argv, f"--run_dir={tmp_path / 'stopped'}"])
    whole, stopped = (load_run(tmp_path / run).params for run in ("whole", "stopped"))
    jax.tree.map(np.testing.assert_array_equal, stopped, whole)
    first = huggingface.read(tmp_path / "model").params
    assert whole["shared"].pop("projection")["kernel"].shape[1] == 8
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), whole, first))) > 1e-3
