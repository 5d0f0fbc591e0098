"""Splits of as many pairs with a given share of unique documents."""

import json

import pytest

from de_jax.data.text import beir
from de_jax.types import InputError
from experiments import repeated_docs


def test_a_split_has_the_pairs_and_the_share_of_unique_documents_asked_for(tmp_path, capsys):
    docs = [(f"d{i}", "", f"text {i}") for i in range(30)]
    train = {f"q{i}": {f"d{i % 10 if i < 60 else i - 50}": 1} for i in range(80)}  # ten documents of six queries, twenty of one
    beir.write(tmp_path, docs, [(query, f"query {query}") for query in train], {"train": train})
    flags = [f"--dataset_dir={tmp_path}", "--num_pairs=20"]
    for share, num_docs in ((0.2, 4), (0.5, 10), (1.0, 20)):
        repeated_docs.main([*flags, f"--unique_share={share}", f"--out_split=train_{num_docs}"])
        assert json.loads(capsys.readouterr().out) == {"split": f"train_{num_docs}", "num_pairs": 20, "num_docs": num_docs}
        found = beir.read_qrels(beir.find_qrels(tmp_path, f"train_{num_docs}"))
        assert all(train[query] == own for query, own in found.items())
        assert len({doc for own in found.values() for doc in own}) == num_docs
    with pytest.raises(InputError, match="2 documents give 12 pairs of the 20 asked for"):
        repeated_docs.main([*flags, "--unique_share=0.1", "--out_split=train_2"])
    repeated_docs.main([*flags, "--unique_share=0.2", "--out_split=train_4"])  # the same command after a stop
    with pytest.raises(InputError, match="has another split train_4 already"):
        repeated_docs.main([*flags, "--unique_share=0.5", "--out_split=train_4"])
