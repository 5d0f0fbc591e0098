"""The report of a data set counts what is in it, what was left out, and what a run makes of it."""

import json
import warnings

import numpy as np
import pytest

from de_jax import cli
from de_jax.data import data_report
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.pair_store import table_pairs
from de_jax.data.sources.training_set import quantiles
from de_jax.data.text import beir, input_policy
from de_jax.data.text.table_files import Table
from de_jax.data.text.vocabulary_training import train_sentencepiece
from de_jax.files import outputs

ROWS = [
    {"query": "why?", "doc": "because it is", "negative": "no", "doc_id": "a"},
    {"query": "why?", "doc": "because it is", "negative": "maybe", "doc_id": "b"},
    {"query": "how?", "doc": "so", "negative": "because it is", "doc_id": "c"},
    {"query": "how?", "doc": "maybe", "negative": "so", "doc_id": "d"},
    {"query": "почему?", "doc": "потому что", "negative": "None", "doc_id": "e"},
    {"query": "", "doc": "y", "negative": "x", "doc_id": "f"},
]


@pytest.mark.filterwarnings("ignore")
def test_a_table_is_counted_with_what_is_left_out_of_it():
    report, lengths = data_report.of_table(Table(ROWS, skip_bad_rows=True))
    expected = {
        "rows": 6,
        "rows_left_out": 1,
        "pairs": 5,
        "distinct_pairs": 4,
        "queries": 3,
        "documents": 6,
        "ids_of_equal_texts": {"queries": 0, "documents": 1},
        "relevant_and_negative": 1,
        "negatives": {"most": 1, "mean": 1.0, "without": 0},
        "scripts": {"latin": 0.7778, "cyrillic": 0.2222},
    }
    assert {name: report[name] for name in expected} == expected
    assert report["lengths"]["documents"] == {"50 %": 1, "99 %": 3, "longest": 3}
    assert sorted(lengths["documents"].tolist()) == [1, 1, 1, 1, 2, 3]
    words, bad = report["told"]
    assert "1 texts are words for nothing" in words
    assert "bad rows left out: 1 (row 6: the text in column 'query' is empty)" in bad


def test_a_beir_folder_is_counted_with_all_of_its_documents(tmp_path):
    docs = [("d1", "", "one text"), ("d2", "", "one text"), ("d3", "a", "third and longest one")]
    beir.write(tmp_path / "data", docs, [("q1", "who?"), ("q2", "not judged here")], {"test": {"q1": {"d1": 1, "d3": 0}}})
    report, _ = data_report.of_folder(str(tmp_path / "data"), "test")
    assert (report["pairs"], report["queries"], report["documents"]) == (1, 1, 2)
    assert report["ids_of_equal_texts"] == {"queries": 0, "documents": 1}
    assert report["negatives"] == {"most": 1, "mean": 1.0, "without": 0}
    assert report["lengths"]["documents"]["longest"] == 5


def test_a_run_counts_what_it_trains_on_and_says_again_what_its_table_left_out(tmp_path):
    train_sentencepiece([row["doc"] for row in ROWS] * 9, tmp_path / "spiece.model", vocab_size=25)
    options = PairsOptions(
        tokenizer=str(tmp_path / "spiece.model"), batch_size=2, max_query_length=8, max_doc_length=8, cache_dir=str(tmp_path)
    )
    reports = []
    for _ in range(2):  # the second one opens the kept folder
        with outputs.collecting() as told, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = table_pairs(ROWS, skip_bad_rows=True, columns={"neg_docs": "negative"}, options=options)
        reports.append((data.counts, told))
    assert reports[0] == reports[1]
    one = reports[0][0][""]
    assert (one["pairs"], one["left_out_of_an_epoch"], one["negatives"]["most"]) == (5, data.batches.num_left_out, 1)
    assert (one["queries"]["trained_on"], one["documents"]["trained_on"]) == (3, 4)
    assert one["documents"]["cut"] >= 1
    assert one["documents"]["copies"] == 0
    assert any("bad rows left out: 1" in sentence for sentence in reports[0][1])


def test_what_is_told_within_is_kept_once_and_by_whoever_asked_around():
    with outputs.collecting() as outer, warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with outputs.collecting(is_quiet=True) as quiet:
            input_policy.tell_skipped("a", ["x"])
        with outputs.collecting() as inner:
            input_policy.tell_skipped("b", ["x"])
            input_policy.tell_skipped("b", ["x"])
    assert [len(quiet), len(inner)] == [1, 1]
    assert outer == inner
    assert quiet[0] not in [str(one.message) for one in shown]


@pytest.mark.filterwarnings("ignore")
def test_the_command_prints_and_draws_the_report(tmp_path, capsys):
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    cli.call("analyse data", [str(tmp_path / "qa.jsonl"), "--columns", "neg_docs=negative", f"--out_dir={tmp_path / 'report'}"])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "report" / "data_report.json").read_text())
    assert (report["pairs"], report["distinct_pairs"], report["unit"]) == (5, 4, "words")
    assert (tmp_path / "report" / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_a_text_without_letters_has_no_script():
    assert data_report._script("12 + 3") == "none"
    assert quantiles(np.zeros(0, np.int64)) == {}
