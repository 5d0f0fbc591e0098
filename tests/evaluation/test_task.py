import functools
import json

import pytest

from de_jax import cli
from de_jax.data.text import beir
from de_jax.evaluation import metrics
from de_jax.evaluation.report import KIND, averaged, kept_ranking, kept_report
from de_jax.evaluation.task import Policy, beir_task, beir_tasks, bm25_results, evaluate
from de_jax.files import folders
from de_jax.reports import tables
from de_jax.types import InputError

QRELS = {f"q{number}": {f"d{number}": 1, f"d{number + 1}": 2, f"d{number * 3 % 7}": 1} for number in range(7)}


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory):
    """Thirds and logarithms in every score."""
    folder = tmp_path_factory.mktemp("data") / "small"
    words = ("red", "fox", "grey", "wolf", "blue", "whale", "owl", "elk")
    docs = [(f"d{number}", "", " ".join(words[number:] + words[:1])) for number in range(8)]
    beir.write(folder, docs, [(f"q{number}", f"{words[number]} {words[7 - number]}") for number in range(7)], {"test": QRELS})
    return folder


def test_a_mean_of_reports_is_that_of_unrounded_scores():
    reports = [
        {"num_docs": 1, "num_queries": 1, "dense": {"ndcg@10": value}} for value in (0.782351, 0.782349, 0.782353, 0.1234567)
    ]
    expected = (0.782351 + 0.782349 + 0.782353 + 0.1234567) / 4
    assert averaged("all", reports)["dense"]["ndcg@10"] == pytest.approx(expected, abs=1e-15)


def test_a_folder_of_data_sets_is_not_one_of_them(tmp_path):
    for name in ("a", "b"):
        beir.write(tmp_path / name, [("d", "", "fox")], [("q", "fox")], {"test": {"q": {"d": 1}}})
    assert beir_task(tmp_path / "a", "test").name == "a"
    with pytest.raises(InputError, match="holds 2 data sets; give the folder of one"):
        beir_task(tmp_path, "test")


def test_half_widths_are_those_before_the_cut(tmp_path):
    docs = [(f"d{number}", "", word) for number, word in enumerate(("fox", "wolf", "owl", "elk"))]
    judged = {"q0": {"d0": 1}, "q1": {"d1": 1}, "q2": {"d0": 1}, "q3": {"d0": 1}}
    queries = [(f"q{number}", word) for number, word in enumerate(("fox", "wolf", "owl", "elk"))]
    beir.write(tmp_path / "ends", docs, queries, {"test": judged})
    report = evaluate(beir_task(tmp_path / "ends", "test"), Policy(measures=["RR@1"]))
    assert report["intervals"]["bm25"]["mrr@1"] == (0.0, 1.0)
    assert report["half_widths"]["bm25"]["mrr@1"] == pytest.approx(0.9187, abs=1e-4)
    assert tables.report_tables([report]).split()[-1] == "0.9187"
    average = averaged("all", [report, report])
    assert average["half_widths"]["bm25"]["mrr@1"] == pytest.approx(0.9187 / 2**0.5, abs=1e-4)


def test_a_score_is_rounded_once_where_it_is_shown():
    report = {"dataset": "small", "num_docs": 1, "num_queries": 1, "dense": {"ndcg@10": 0.782351}}
    assert tables.report_tables([report]).split()[-1] == "0.7824"
    below = {**report, "dense": {"ndcg@10": 0.123449999}}
    assert tables.report_tables([below]).split()[-1] == "0.1234"
    assert tables.report_tables([averaged("mean", [report, below])]).split()[-1] == "0.4529"


def test_a_kept_evaluation_is_read_as_it_was_written_or_not_at_all(tmp_path):
    report = {"dataset": "small", "num_docs": 2, "num_queries": 1, "dense": {"ndcg@10": 0.5, "ap": 0.25}}
    with folders.atomic_dir(tmp_path / "kept", KIND) as temporary:
        (temporary / "result.json").write_text(json.dumps(report))
        metrics.write_trec_run(temporary / "dense.trec", {"q": {"d": 2.5}})
    assert list(kept_report(tmp_path / "kept", ["ap", "ndcg@10"])["dense"]) == ["ap", "ndcg@10"]
    with pytest.raises(InputError, match=r"result\.json: dense/recall is absent"):
        kept_report(tmp_path / "kept", ["recall"])
    (tmp_path / "kept" / "dense.trec").write_text("q Q0 d 1 3.5 de_jax\n")
    for read in (kept_ranking, functools.partial(kept_report, names=["ap"])):
        with pytest.raises(InputError, match=r"dense\.trec has another SHA-256"):
            read(tmp_path / "kept")


def test_judged_empty_texts_count_as_not_found(tmp_path):
    docs = [("a", "", "red fox"), ("b", "", " "), ("c", "", "grey wolf"), ("d", "", "blue whale")]
    queries = [("q", "fox"), ("empty", ""), ("c", "wolf")]
    qrels = {"q": {"a": 1, "b": 1}, "empty": {"c": 1}, "c": {"c": 1}}
    beir.write(tmp_path / "holes", docs, queries, {"test": qrels})
    (task,) = beir_tasks(tmp_path / "holes", "test")
    policy = Policy(measures=["R@10"], skip_empty=True)
    with pytest.warns(UserWarning, match=r"holes: judgements dropped, .*: 1 \(c\); .* keep_identical_ids ranks them"):
        report = evaluate(task, policy)
    assert (report["num_queries"], report["num_docs"]) == (3, 3)
    assert report["bm25"]["recall@10"] == pytest.approx((0.5 + 0 + 0) / 3)
    kept = evaluate(task, policy._replace(drop_identical_ids=False))
    assert kept["bm25"]["recall@10"] == pytest.approx((0.5 + 0 + 1) / 3)


def test_every_command_gives_scores_as_they_are(dataset_dir, tmp_path, capsys):
    (task,), policy = beir_tasks(dataset_dir, "test"), Policy(measures=["nDCG@10", "AP"])
    results = bm25_results(task, policy)
    expected = metrics.evaluate_results(results, QRELS, measures=policy.measures)
    assert all(round(value, 5) != value for value in expected.values())
    assert evaluate(task, policy)["bm25"] == expected
    assert bm25_results(task, policy._replace(depth=2**31 - 1)) == results  # no more than there are documents
    cli.call("evaluate beir", ["--dataset_dirs", str(dataset_dir), "--measures", *policy.measures])
    report = json.loads(capsys.readouterr().out)
    assert report["sets"][0]["bm25"] == report["average"]["bm25"] == expected
    metrics.write_trec_run(tmp_path / "run.trec", results)
    qrels_file = dataset_dir / "qrels" / "test.tsv"
    cli.call("evaluate trec", [f"--qrels={qrels_file}", f"--run_file={tmp_path / 'run.trec'}", "--measures", *policy.measures])
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in expected} == expected
    cli.call("compare runs", [f"--qrels={qrels_file}", "--systems", *(f"{name}={tmp_path / 'run.trec'}" for name in "ab")])
    systems = json.loads(capsys.readouterr().out)["systems"]
    assert systems["a"]["mean"] == pytest.approx(expected["ndcg@10"], abs=1e-15)
