"""The comparison of formats on a set that is small enough for it."""

import json

import pytest
import toy_run

from de_jax.data.text import beir
from experiments import table_formats


@pytest.mark.soak
def test_formats_are_compared_and_repeated_texts_counted(tmp_path, capsys):
    folder = toy_run.write_dataset(tmp_path / "toy")
    queries = dict(beir.iter_queries(folder / "queries.jsonl")) | {f"q{i}": "the same" for i in range(10)}
    docs = [(one, "", text) for one, text in beir.iter_docs(folder / "corpus.jsonl.gz")]
    beir.write(folder / "repeated", docs, queries.items(), {"train": beir.read_qrels(folder / "qrels" / "train.tsv")})
    flags = [f"--tokenizer={folder / 'spiece.model'}", "--batch_size=8", "--num_batches=30", "--num_steps=2", "--formats", "csv"]
    table_formats.main(["--dataset_dir", str(folder), str(folder / "repeated"), *flags])
    one, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert (one["repeated_texts"], one["csv"]) == (0, {"different_batches": 0, "different_parameters": 0})
    assert (other["repeated_texts"], other["csv"]) == (9, one["csv"])  # equal texts are one text, whatever their ids
