"""Descriptions of models are read as their versions meant them."""

import pytest

from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DESCRIPTION, DualEncoder
from de_jax.models.rotary import RotaryConfig
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.settings import Mismatch

SIZES = {"vocab_size": 30, "model_dim": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 8}
ENCODERS = {"T5Config": T5Config(**SIZES, head_dim=4), "BertConfig": BertConfig(**SIZES), "RotaryConfig": RotaryConfig(**SIZES)}


def described(architecture, **changes):
    """As a run.json has a model, with the same changes of both towers."""
    tower = TowerConfig(ENCODERS[architecture], projection_dim=4)
    value = DualEncoder(tower, tower).to_json()
    for name in ("query", "doc"):
        for key, one in changes.items():
            (value[name]["encoder"] if key in value[name]["encoder"] else value[name])[key] = one
    return value


@pytest.mark.parametrize("given", [{"pooling": 3}, {"pooling": None}, {"dtype": "float16"}])
def test_other_values_are_refused(given):
    with pytest.raises(Mismatch, match="expected"):
        DESCRIPTION(described("T5Config", **given))


@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_choice_that_this_version_does_not_know_is_refused(architecture):
    with pytest.raises(Mismatch, match="query/pooling is 'cls', expected 'mean', 'first', 'last', 'max', 'mean_sqrt_len' or"):
        DESCRIPTION(described(architecture, pooling="cls"))
