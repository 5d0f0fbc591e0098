"""Adapters that peft has written, merged into the model that they name, and what is refused; test_architectures writes them."""

import json

import numpy as np
import pytest
import safetensors.numpy
from pretrained_folders import torch_model, write, write_encoder

from de_jax.interop import any_model
from de_jax.training.optim import paths
from de_jax.types import InputError

VALUE = "encoder.layer.0.attention.self.value"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["value"], "bias": "none", "peft_version": "0.21.2"}


@pytest.fixture
def folder(tmp_path):
    """Of one adapter, for a BERT beside it."""
    write_encoder(tmp_path / "base", "bert")
    write(tmp_path / "adapter" / "adapter_config.json", {**CONFIG, "base_model_name_or_path": str(tmp_path / "base")})
    save(tmp_path / "adapter", lora_A=np.ones((2, 32)), lora_B=np.arange(64.0).reshape(32, 2))
    return tmp_path / "adapter"


def save(folder, module=VALUE, **arrays):
    named = {f"base_model.model.{module}.{name}.weight": array.astype(np.float32) for name, array in arrays.items()}
    safetensors.numpy.save_file(named, folder / "adapter_model.safetensors")


def test_adapters_are_merged_into_the_model_that_they_name(folder):
    before, after = (paths.by_path(any_model.read(one).params) for one in (folder.parent / "base", folder))
    (moved,) = (path for path in before if not np.array_equal(before[path], after[path]))
    assert moved == "shared/encoder/layers_0/attention/value/kernel"
    added = 1.5 * (np.ones((32, 2)) @ np.arange(64.0).reshape(32, 2).T)
    np.testing.assert_allclose(after[moved] - before[moved], added, rtol=1e-5)
    config = json.loads((folder / "adapter_config.json").read_text())
    patterns = {"use_rslora": True, "rank_pattern": {"layer.0.attention.self.value": 2}, "alpha_pattern": {"value": 5}, "r": 7}
    write(folder / "adapter_config.json", {**config, **patterns})
    again = paths.by_path(any_model.read(folder).params)
    np.testing.assert_allclose(again[moved] - before[moved], added / 1.5 * 5 / 2**0.5, rtol=1e-5)
    assert paths.by_path(any_model.read(folder, only_sizes=True).params)[moved].shape == (32, 32)


def test_patterns_match_the_name_that_a_module_has_in_peft(folder):
    """With a model with heads, the names of modules begin with the encoder's."""
    save(folder, module=f"bert.{VALUE}", lora_A=np.ones((2, 32)), lora_B=np.ones((32, 2)))
    config = json.loads((folder / "adapter_config.json").read_text())
    write(folder / "adapter_config.json", {**config, "alpha_pattern": {f"bert.{VALUE}": 7}})
    before, after = (any_model.read(one).params["shared"]["encoder"]["layers_0"] for one in (folder.parent / "base", folder))
    difference = after["attention"]["value"]["kernel"] - before["attention"]["value"]["kernel"]
    np.testing.assert_allclose(difference, 7.0, rtol=1e-5)


def test_files_of_other_libraries_beside_adapters_are_not_skipped(folder):
    vocabulary = json.loads((folder.parent / "base" / "tokenizer.json").read_text())
    write(folder / "tokenizer.json", {**vocabulary, "padding": None, "truncation": {"max_length": 9}})
    assert any_model.read(folder, only_sizes=True)
    write(folder / "tokenizer.json", {**vocabulary, "normalizer": None})
    with pytest.raises(InputError, match=r"adapter/tokenizer\.json is another vocabulary than that of .*base, which texts are"):
        any_model.read(folder, only_sizes=True)
    write(
        folder / "modules.json",
        [{"type": f"sentence_transformers.models.{name}", "path": ""} for name in ("Transformer", "Pooling")],
    )
    with pytest.raises(InputError, match=r"adapter_config\.json changes the weights of an encoder; merge it first"):
        any_model.read(folder, only_sizes=True)


@pytest.mark.parametrize(
    ("config", "arrays", "message"),
    [
        ({"peft_type": "IA3"}, {}, "adapter_config.json: peft_type is 'IA3'"),
        ({"use_dora": True}, {}, "adapter_config.json: use_dora is True; the towers here have False"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights is 'pissa'"),
        ({"modules_to_save": ["classifier"]}, {}, "modules_to_save is "),
        ({"new_trick": 1}, {}, "the setting new_trick"),
        ({"r": 3}, {}, r"has adapters of \(2, 32\) and \(32, 2\) that are not finite numbers of rank 3"),
        ({}, {"lora_A": np.ones((2, 32))}, r"adapter_model.safetensors: .*value.lora_B.weight is missing for the encoder of"),
        ({}, {"module": "encoder.decoder"}, r"encoder.decoder.lora_A.weight has no place in the encoder of"),
        ({}, {"lora_B": np.full((32, 2), np.nan)}, "not finite"),
        (
            {},
            {"lora_A": np.full((2, 32), 3e38), "lora_B": np.full((32, 2), 3e38)},
            r"adapter_model.* is too large: .* beyond float32",
        ),
        ({}, {"lora_B": np.ones((40, 2))}, "does not fit the base"),
        ({"base_model_name_or_path": "/nowhere"}, {}, r"adapter_config\.json: /nowhere does not exist"),
        ({"base_model_name_or_path": "itself"}, {}, "which holds no config.json of transformers"),
    ],
)
def test_what_cannot_be_merged_is_refused_in_one_sentence(folder, config, arrays, message):
    if config.get("base_model_name_or_path") == "itself":
        config = {"base_model_name_or_path": str(folder)}
    said = json.loads((folder / "adapter_config.json").read_text())
    write(folder / "adapter_config.json", {**said, **config})
    if arrays:
        whole = {"lora_A": np.ones((2, 32)), "lora_B": np.ones((32, 2))}
        save(folder, **(arrays if set(arrays) == {"lora_A"} else {**whole, **arrays}))
    with pytest.raises(InputError, match=message):
        any_model.read(folder)


@pytest.mark.soak
def test_what_peft_saves_is_read(tmp_path):
    import peft
    import torch

    hidden = write_encoder(tmp_path / "base", "bert")
    model = torch_model("bert")
    model.name_or_path = model.config._name_or_path = str(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["query", "dense"], lora_dropout=0.1, rank_pattern={"query": 2})
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    found = any_model.read(tmp_path / "adapter")
    assert hidden
    for layer in range(2):
        for ours, theirs in (("query", "self.query"), ("out", "output.dense")):
            kernel = found.params["shared"]["encoder"][f"layers_{layer}"]["attention"][ours]["kernel"]
            np.testing.assert_allclose(kernel, merged[f"encoder.layer.{layer}.attention.{theirs}.weight"].T, atol=1e-5)
