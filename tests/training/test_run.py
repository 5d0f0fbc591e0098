"""A run's description of itself: another model or length is refused by its first difference."""

import dataclasses

import pytest

from de_jax.data.text.tokenizing import Side, load_tokenizer
from de_jax.data.text.vocabulary_training import train_sentencepiece
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.run.run_folder import RUN, describe_run, load_run
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

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("of another program")
    with pytest.raises(InputError, match=r"run holds metrics\.jsonl but no run\.json, so it cannot be continued"):
        describe()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "run" / "notes.txt")  # such files do no harm
    describe(doc=Side(tokenizer, 1))  # a first start that fails later leaves no checkpoint, and the mended one is described anew
    describe()
    before = (tmp_path / "run" / RUN.file).read_bytes()
    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    describe()
    for remat, scan_layers in (("full", False), ("none", True)):  # the advice where memory is short
        changed = dataclasses.replace(model(32).query.encoder, remat=remat, scan_layers=scan_layers)
        other = model(32)._with_encoders(remat=remat, scan_layers=scan_layers)
        assert other.query.encoder == changed
        assert other.as_function() == model(32)
        describe(model=other)
    for changes, sentence in (
        ({"model": model(24)}, "model/doc/encoder/mlp_dim 32, not 24"),
        ({"doc": Side(tokenizer, 16)}, "max_doc_length 24, not 16"),
        ({"doc": Side(tokenizer, 24, 3)}, "max_passages 1, not 3"),
    ):
        with pytest.raises(InputError, match=f"was begun with {sentence}; use the recipe"):
            describe(**changes)
    assert (tmp_path / "run" / RUN.file).read_bytes() == before


def test_a_model_of_another_library_is_told_how_it_becomes_a_run(tmp_path):
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(
        InputError, match=r"is another library's model; make a run of it with de-jax import model --run_dir=<run> --from="
    ):
        load_run(tmp_path)
