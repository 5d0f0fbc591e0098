"""A smaller BEIR folder: what dev and test judge stays, and nothing refers to a text that is gone."""

import json

import pytest

from de_jax.data.text import beir
from de_jax.types import InputError
from experiments import sample_corpus


def test_judged_documents_stay_and_what_is_left_fits_together(tmp_path, capsys):
    queries = [(f"q{i}", f"query {i}") for i in range(20)]
    qrels = {"train": {f"q{i}": {f"d{i}": 1} for i in range(15)}, "test": {f"q{i}": {f"d{i}": 1} for i in range(15, 20)}}
    beir.write(tmp_path / "whole", [(f"d{i}", "", f"text {i}") for i in range(50)], queries, qrels)
    arguments = [f"--dataset_dir={tmp_path / 'whole'}", "--num_docs=20", f"--out_dir={tmp_path / 'part'}"]
    sample_corpus.main(arguments)
    docs = dict(beir.iter_docs(beir.find_file(tmp_path / "part", "corpus")))
    left = {split: beir.read_qrels(beir.find_qrels(tmp_path / "part", split)) for split in qrels}
    assert len(docs) == json.loads(capsys.readouterr().out)["num_docs"] == 20
    assert left["test"] == qrels["test"]
    assert left["train"] == {query: own for query, own in qrels["train"].items() if own.keys() <= docs.keys()}
    asked = {query for own in left.values() for query in own}
    assert dict(beir.iter_queries(beir.find_file(tmp_path / "part", "queries"))).keys() == asked
    with pytest.raises(InputError, match="exists already"):
        sample_corpus.main(arguments)


def test_the_rest_is_what_was_not_kept(tmp_path, capsys):
    queries = [(f"q{i}", f"query {i}") for i in range(20)]
    qrels = {"train": {f"q{i}": {f"d{i}": 1} for i in range(15)}, "test": {f"q{i}": {f"d{i}": 1} for i in range(15, 20)}}
    beir.write(tmp_path / "whole", [(f"d{i}", "", f"text {i}") for i in range(50)], queries, qrels)
    part, rest = tmp_path / "part", tmp_path / "rest"
    sample_corpus.main([f"--dataset_dir={tmp_path / 'whole'}", "--num_docs=20", f"--out_dir={part}", f"--rest_dir={rest}"])
    kept, left = (dict(beir.iter_docs(beir.find_file(folder, "corpus"))) for folder in (part, rest))
    assert not kept.keys() & left.keys()
    assert kept | left == {f"d{i}": f"text {i}" for i in range(50)}
    assert [path.name for path in (rest / "qrels").iterdir()] == ["train.tsv"]
    trained = [beir.read_qrels(beir.find_qrels(folder, "train")) for folder in (part, rest)]
    assert not trained[0].keys() & trained[1].keys()
    assert trained[0] | trained[1] == qrels["train"]
    assert json.loads(capsys.readouterr().out)["rest"]["num_docs"] == 30


def test_only_the_splits_that_were_named(tmp_path, capsys):
    queries = [(f"q{i}", f"query {i}") for i in range(6)]
    qrels = {"train": {"q0": {"d0": 1}}, "dev": {"q1": {"d1": 1}, "q2": {"d2": 1}}, "test": {"q3": {"d3": 1}}}
    beir.write(tmp_path / "whole", [(f"d{i}", "", f"text {i}") for i in range(6)], queries, qrels)
    arguments = [f"--dataset_dir={tmp_path / 'whole'}", "--num_docs=1", "--splits", "train", "test"]
    sample_corpus.main([*arguments, f"--out_dir={tmp_path / 'part'}"])
    assert json.loads(capsys.readouterr().out)["judgements"] == {"test": 1}
    assert list(dict(beir.iter_docs(beir.find_file(tmp_path / "part", "corpus")))) == ["d3"]
    with pytest.raises(InputError, match="dev2"):
        sample_corpus.main([*arguments, "dev2", f"--out_dir={tmp_path / 'other'}"])


def test_queries_that_are_held_out_are_trained_with_no_more(tmp_path, capsys):
    qrels = {"train": {f"q{i}": {f"d{i}": 1} for i in range(10)}, "test": {"q10": {"d10": 1}}}
    queries = [(f"q{i}", f"query {i}") for i in range(11)]
    beir.write(tmp_path / "whole", [(f"d{i}", "", f"text {i}") for i in range(11)], queries, qrels)
    arguments = [f"--dataset_dir={tmp_path / 'whole'}", "--num_docs=8", "--hold_out=3", f"--rest_dir={tmp_path / 'rest'}"]
    sample_corpus.main([*arguments, f"--out_dir={tmp_path / 'part'}"])
    report = json.loads(capsys.readouterr().out)
    assert report["judgements"] == {"held_out": 3, "test": 1, "train": 4}
    assert report["rest"]["judgements"] == {"train": 3}, "only queries about what was kept are held out"
    trained, held_out = (beir.read_qrels(beir.find_qrels(tmp_path / "part", split)) for split in ("train", "held_out"))
    assert not trained.keys() & held_out.keys()
    again = [f"--dataset_dir={tmp_path / 'part'}", "--num_docs=8", f"--out_dir={tmp_path / 'again'}"]
    sample_corpus.main(again)
    assert json.loads(capsys.readouterr().out)["judgements"]["held_out"] == 3, "a sample of the sample keeps the split"
    with pytest.raises(InputError, match="makes a split held_out of train"):
        sample_corpus.main([*again[:-1], "--hold_out=1", f"--out_dir={tmp_path / 'other'}"])
