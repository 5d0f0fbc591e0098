"""What a run measures the divergence of its towers on."""

import numpy as np
import pytest
import tiny_run
from flat_settings import flat

from de_jax.data import beir
from de_jax.data.text import train_sentencepiece
from de_jax.data.training_set import beir_pairs


@pytest.fixture
def folder(tmp_path):
    tiny_run.write_dataset(tmp_path / "data")
    train_sentencepiece(
        [f"{a} {b} the of and" for a in tiny_run.WORDS for b in tiny_run.WORDS], tmp_path / "spiece.model", vocab_size=30
    )
    return tmp_path


def queries_for_both(folder, **settings):
    data = flat(beir_pairs)(
        dataset_dir=str(folder / "data"),
        tokenizer=str(folder / "spiece.model"),
        cache_dir=str(folder / "cache"),
        batch_size=1,
        num_for_both=5,
        **settings,
    )
    return {data.query_ids[int(row)] for row in np.asarray(data.for_both.rows)}


def test_towers_are_compared_on_dev_queries_wherever_there_is_a_dev_split(folder):
    assert queries_for_both(folder) == set(tiny_run.QRELS["train"])
    qrels = {**tiny_run.QRELS, "dev": {"d3": {"d6": 1}}}
    beir.write(folder / "data", tiny_run.DOCS, tiny_run.QUERIES, qrels)
    assert queries_for_both(folder) == {"d3"}
    assert queries_for_both(folder, dev_split="test") == set(tiny_run.QRELS["test"])
