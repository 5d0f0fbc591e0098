"""Descriptions of models are read as their versions meant them."""

import dataclasses
import warnings

import pytest

from de_jax.files import schema
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.rotary import RotaryConfig
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.run import model_schema

SIZES = {"vocab_size": 30, "model_dim": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 8}
ENCODERS = {
    "T5Config": (T5Config(**SIZES, head_dim=4), "dropout_broadcast"),
    "BertConfig": (BertConfig(**SIZES), "attention_dropout_rate"),
    "RotaryConfig": (RotaryConfig(**SIZES), ""),
}


def described(architecture, *, is_old, **changes):
    """As a run.json has a model, with the same changes of both towers; version 0.1.0 lacked a field of each encoder."""
    encoder, later = ENCODERS[architecture]
    tower = TowerConfig(encoder, projection_dim=4)
    value = DualEncoder(tower, tower).to_json()
    for name in ("query", "doc"):
        for key, one in changes.items():
            (value[name]["encoder"] if key in value[name]["encoder"] else value[name])[key] = one
        if is_old:
            del value[name]["encoder"][later]
    return value


@pytest.mark.parametrize(
    ("architecture", "given", "trained"),
    [
        ("T5Config", {"pooling": "cls"}, {"pooling": "mean"}),
        ("BertConfig", {"pooling": "max"}, {"pooling": "mean"}),
        ("T5Config", {"activation": "swiglu"}, {"activation": "relu"}),
        ("T5Config", {"remat": "ful"}, {"remat": "full"}),
        ("BertConfig", {"pooling": "first"}, {"pooling": "first"}),
    ],
)
def test_a_choice_that_version_0_1_0_took_in_silence_is_opened_as_it_was_trained(architecture, given, trained):
    (name,) = given
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model = DualEncoder.from_json(model_schema.DUAL_ENCODER(described(architecture, is_old=True, **given)))
    said = f"version 0.1.0 did not know {name} {given[name]!r} and trained with {trained[name]!r}, as which it is opened."
    assert {str(one.message) for one in caught} == ({said} if given != trained else set())
    tower = dataclasses.asdict(model.query)
    assert trained.items() <= {**tower["encoder"], **tower}.items()


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("given", [{"pooling": 3}, {"pooling": None}, {"dtype": "float16"}])
def test_other_values_are_refused_of_every_version(is_old, given):
    with pytest.raises(schema.Mismatch, match="expected"):
        model_schema.DUAL_ENCODER(described("T5Config", is_old=is_old, **given))


@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_choice_that_this_version_does_not_know_is_refused(architecture):
    with pytest.raises(schema.Mismatch, match="query/pooling is 'cls', expected 'mean' or 'first' or 'last'"):
        model_schema.DUAL_ENCODER(described(architecture, is_old=False, pooling="cls"))
