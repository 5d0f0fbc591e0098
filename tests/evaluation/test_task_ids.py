"""Ids that a TREC run file cannot hold."""

from types import SimpleNamespace

import pytest

from de_jax.evaluation import task
from de_jax.training.run.run_folder import Run
from de_jax.types import InputError


@pytest.mark.parametrize("bad", ["two words", "a\tb", "a\u00a0b"])
@pytest.mark.parametrize("side", [0, 1])
def test_an_id_with_a_blank_is_found_before_anything_is_encoded(monkeypatch, tmp_path, side, bad):
    ids = [["q1"], ["d1"]]
    ids[side].append(bad)
    monkeypatch.setattr(task, "stores", lambda *_: tuple(SimpleNamespace(ids=one, skipped_ids=()) for one in ids))
    monkeypatch.setattr(task.corpus_embeddings, "cached_docs", lambda *_, **__: pytest.fail("encoded"))
    judged = task.Task("set", tmp_path, tmp_path, {one: {"d1": 1} for one in ids[0]}, split="test")
    with pytest.raises(InputError, match="holds a blank, so it cannot stand in a TREC run file"):
        task.encoded(Run(*(None,) * len(Run._fields)), judged, task.Policy())
