"""A run's description of itself: another model or length is refused by its first difference."""

import pytest

from de_jax.data.text.sides import Side
from de_jax.data.text.tokenizing import load_tokenizer, train_sentencepiece
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.run.run_folder import DESCRIPTION_FILE, describe_run
from de_jax.types import InputError


def model(mlp_dim):
    tower = TowerConfig(T5Config(vocab_size=30, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=mlp_dim))
    return DualEncoder(tower, tower)


def test_a_run_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path):
    letters = "abcdefghij"
    train_sentencepiece([f"{a}{b} {b}{a}" for a in letters for b in letters], tmp_path / "spiece.model", vocab_size=30)
    tokenizer = load_tokenizer(tmp_path / "spiece.model")

    def describe(**changes):
        described = {"model": model(32), "query": Side(tokenizer, 16), "doc": Side(tokenizer, 24), **changes}
        describe_run(tmp_path / "run", **described)

    describe()
    before = (tmp_path / "run" / DESCRIPTION_FILE).read_bytes()
    describe()
    for changes, sentence in (
        ({"model": model(24)}, "model/doc/encoder/mlp_dim = 32, but this recipe has 24"),
        ({"doc": Side(tokenizer, 16)}, "max_doc_length = 24, but this recipe has 16"),
        ({"doc": Side(tokenizer, 24, 3)}, "max_passages = 1, but this recipe has 3"),
    ):
        with pytest.raises(InputError, match=f"holds a run with {sentence}"):
            describe(**changes)
    assert (tmp_path / "run" / DESCRIPTION_FILE).read_bytes() == before
