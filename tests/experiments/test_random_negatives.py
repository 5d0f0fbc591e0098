"""Random negatives are a generation that training reads, without relevant documents."""

import json

from de_jax.data.negatives import generations
from de_jax.data.text import beir
from experiments import random_negatives


def test_every_pair_gets_documents_that_are_not_relevant(tmp_path, capsys):
    docs, queries = [(f"d{i}", "", f"text {i}") for i in range(9)], [("q0", "one"), ("q1", "two"), ("d3", "three")]
    train = {"q0": {"d0": 1, "d1": 1, "d2": 0}, "q1": {"d5": 2}, "d3": {"d4": 1}}
    beir.write(tmp_path / "data", docs, queries, {"train": train})
    arguments = [f"--dataset_dir={tmp_path / 'data'}", f"--negatives_dir={tmp_path / 'negatives'}", "--num_neg_docs=30"]
    random_negatives.main(arguments)
    assert json.loads(capsys.readouterr().out)["num_pairs"] == 4
    lines = list(generations.read(generations.open_newest(tmp_path / "negatives")).lines())
    found = {(line.query_id, line.doc_id): set(line.neg_doc_ids) for line in lines}
    everything = {doc_id for doc_id, _, _ in docs}
    assert found == {  # 30 draws find them all
        ("q0", "d0"): everything - {"d0", "d1"},
        ("q0", "d1"): everything - {"d0", "d1"},
        ("q1", "d5"): everything - {"d5"},
        ("d3", "d4"): everything - {"d3", "d4"},
    }
