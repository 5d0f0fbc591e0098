"""Each benchmark at its smallest: one JSON line with the figures that the results are read from."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pretrained_folders
import pytest
import tiny_run

from benchmarks import compare_peers, encode_throughput, lengths, measure, model_parts, step_time
from de_jax.data.text import beir
from de_jax.types import InputError

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"device", "backend", "processor", "num_cpus", "load_average", "python", "versions", "commit", "sizes"}
SMALL = ("--model=tiny", "--repeats=1", "--peak_tflops=0.1")
ONE_LAYER = "--gin=T5Config.num_layers=1"


@pytest.fixture
def run(printed):
    def run(benchmark, *arguments, small=SMALL):
        (report,) = printed(benchmark, *small, *arguments)
        return report

    return run


@pytest.fixture(scope="module")
def encoded():
    """What `encode_throughput` measures."""
    return encode_throughput.measured(
        [*SMALL, "--num_passages=9", "--num_queries=20", "--dtype=float32", "--peer_dtypes", "float32", "--peer_runtimes"]
    )


@pytest.mark.soak
def test_encode_throughput_stands_beside_a_peer_that_gives_the_same_embeddings(encoded):
    assert encoded.keys() >= ENVIRONMENT | {"peer", "peak_tflops"}
    for kind, num_texts in (("passages", 9), ("queries", 20)):
        found = encoded[kind]
        assert found["num_texts"] == num_texts
        assert found["texts_per_second"].keys() == {"ours", "peer_float32"}
        assert found["speedup"]["peer_float32"].keys() == {"median", "min", "max"}
        assert found["min_cosine"]["peer_float32"] > 0.9999
        assert 0 < found["mfu_useful"] < 10


@pytest.mark.soak
def test_the_parts_of_an_encoder_are_timed_beside_the_whole(run):
    report = run("encoder_parts", "--rows", "2", "--length", "8", "--calls", "1")
    assert {"attention", "mlp in", "whole"} < report["milliseconds"].keys()
    assert report["peak_share"].keys() == report["milliseconds"].keys() - {"activation", "norms and residuals", "whole"}
    assert report["qkv_in_one"].keys() == {"median", "min", "max"}


@pytest.mark.soak
def test_the_parts_of_encoding_are_timed_beside_the_whole(run, tmp_path):
    pretrained_folders.write_sentence_transformer(tmp_path / "bert", "bert")
    small = [f"--model={tmp_path / 'bert'}", f"--dataset_dir={tiny_run.write_dataset(tmp_path)}", *SMALL[1:]]
    sizes = ["--num_passages=3", "--max_doc_length=40", "--num_queries=2", "--max_query_length=20"]
    report = run("encode_throughput", *sizes, "--peer_dtypes", "bfloat16", "--parts", small=small)
    for kind in ("passages", "queries"):
        parts = report[kind]["parts"]
        assert parts.pop("speedup_bound") > 0
        assert parts.keys() == {"products", "attention", "gelu", "norms", "host", "rest"}
        assert sum(part["share"] for part in parts.values()) == pytest.approx(1, abs=0.01)


def test_the_bound_of_a_speedup_is_the_peers_time_over_products_and_attention():
    found = model_parts.shares({"ours": 2.0, "products": 1.0, "attention": 0.5, "host": 0.1, "peer": 3.0})
    assert found.pop("speedup_bound") == 2.0
    assert found["rest"] == {"seconds": 0.4, "share": 0.2}
    assert found["products"] == {"seconds": 1.0, "share": 0.5}
    assert "speedup_bound" not in model_parts.shares({"ours": 2.0, "products": 1.0, "attention": 0.5})


def test_the_parts_of_encoding_are_those_of_berts_kind(run):
    with pytest.raises(InputError, match=r"--parts needs a model of BERT's kind; benchmarks\.encoder_parts times those of T5's"):
        run("encode_throughput", "--no_peer", "--parts")


@pytest.mark.parametrize(
    ("program", "flags"),
    [("encode_throughput", ["--max_doc_length=999"]), ("step_time", ["--batch_size=2", "--query_length=8", "--doc_length=999"])],
)
def test_texts_longer_than_the_models_positions_are_refused(run, tmp_path, program, flags):
    pretrained_folders.write_sentence_transformer(tmp_path / "bert", "bert")
    with pytest.raises(InputError, match=r"max_doc_length is 999, but the doc tower has positions for \d+ tokens"):
        run(program, "--no_peer", *flags, small=[f"--model={tmp_path / 'bert'}", *SMALL[1:]])


@pytest.fixture(scope="module")
def stepped():
    """What `step_time` measures, by loss."""
    flags = [*SMALL, "--batch_size=4", "--real_lengths", "--num_batches=1", "--dtype=float32", "--optimizer=adamw"]
    return {loss: step_time.measured([*flags, ONE_LAYER, f"--loss={loss}"]) for loss in step_time.LOSSES}


@pytest.mark.soak
@pytest.mark.parametrize("loss", step_time.LOSSES)
def test_step_time_stands_beside_a_peer_that_has_the_same_loss(stepped, loss):
    report = stepped[loss]
    assert report.keys() >= ENVIRONMENT | {"mfu_useful", "mfu_computed", "computed_over_useful", "memory_gib", "seconds_per_step"}
    assert report["speedup"]["peer"].keys() == {"median", "min", "max"}
    assert report["pairs_per_second"].keys() == {"ours", "peer"}
    assert report["memory_gib"]["ours"]["temporaries"] > 0
    assert report["first_loss"]["ours"] > 0
    assert abs(report["first_loss_apart"]["peer"]) < 1e-4


@pytest.mark.soak
def test_peers_are_compared_in_one_run_by_the_medians_of_both_programs(run, encoded, stepped, monkeypatch):
    reports = {encode_throughput: encoded, step_time: stepped["in_batch_softmax"]}
    for program, report in reports.items():  # asked by arguments that it takes
        monkeypatch.setattr(program, "measured", lambda argv, p=program, r=report: p._parse_args(argv) and r)
    monkeypatch.setitem(compare_peers.NAMES, "peer_float32", "peer")
    report = run("compare_peers", "--batch_size", "4", "--num_passages", "9", "--num_queries", "20", "--no_compiled")
    assert report.keys() >= ENVIRONMENT
    works = {"training_step": reports[step_time], "encode_passages": encoded["passages"], "encode_queries": encoded["queries"]}
    for work, found in works.items():
        (expected,) = found["speedup"].values()
        assert report["speedup"][work] == {"peer": expected["median"]}
        assert report["per_second"][work].keys() == {"ours", "peer"}
        assert report["mfu_useful"][work] == found["mfu_useful"]


@pytest.mark.soak
def test_a_benchmark_without_its_peer_says_why(run):
    report = run("step_time", "--batch_size", "2", "--query_length", "8", "--doc_length", "8", "--no_peer", "--parts", ONE_LAYER)
    assert report["parts"].keys() == {"products", "attention", "rest"}
    assert report["peer"] is None
    assert report["speedup"] == {}
    assert report["no_peer_because"] == "--no_peer was given"
    assert report["doc_length"] == {"mean": 8.0, "longest": 8, "rows": [[2, 8], [2, 8]]}
    assert report["computed_over_useful"] == {"ours": 1.0, "peer": 1.0}


def test_lengths_have_the_means_of_msmarco_and_are_the_same_each_time():
    for kind, mean in (("query", 8.7), ("doc", 73)):
        drawn = lengths.msmarco_like(kind, 20000, seed=0)
        assert drawn.mean() == pytest.approx(mean, rel=0.01)
        assert np.median(drawn) < drawn.mean()
        np.testing.assert_array_equal(drawn, lengths.msmarco_like(kind, 20000, seed=0))


def test_real_texts_are_those_of_a_dataset_and_pairs_those_judged_relevant(tmp_path, monkeypatch):
    dataset_dir = tiny_run.write_dataset(tmp_path)
    tokenizer = tiny_run.train_tokenizer(tmp_path / "spiece.model")
    monkeypatch.setattr(lengths, "_tokenizer", lambda model, kind: tokenizer)

    def ids(text, max_length):
        return [*tokenizer.encode([text])[0][: max_length - 1], *tokenizer.suffix_ids]

    of_queries = lengths.real_texts(str(dataset_dir), "folder", "query", 2)
    expected = [ids(text, 16) for _, text in tiny_run.QUERIES[:2]]
    assert [text.tolist() for text in lengths.ids_of(of_queries, 16)] == expected
    (pair,) = zip(*(lengths.ids_of(side, 5) for side in lengths.real_pairs(str(dataset_dir), "folder", 1).values()), strict=True)
    _, title, text = tiny_run.DOCS[2]
    assert [side.tolist() for side in pair] == [ids("grey wolf den", 5), ids(f"{title} {text}", 5)]
    with pytest.raises(InputError, match="has 1 pairs, but 2 are asked for"):
        lengths.real_pairs(str(dataset_dir), "folder", 2)


def test_real_texts_need_a_model_with_a_tokenizer(tmp_path):
    with pytest.raises(InputError, match="--model is small; give a folder"):
        lengths.real_texts(str(tiny_run.write_dataset(tmp_path)), "small", "doc", 1)


@pytest.mark.soak
def test_a_model_in_a_folder_stands_beside_the_same_model_in_torch_on_real_texts(run, tmp_path):
    import pretrained_folders

    pretrained_folders.write_sentence_transformer(tmp_path / "model", "bert")
    config = tmp_path / "model" / "config.json"
    config.write_text(re.sub(r'(dropout_prob": )0.1', r"\g<1>0.0", config.read_text()))
    beir.write(tmp_path / "data", tiny_run.DOCS, tiny_run.QUERIES, {"test": tiny_run.QRELS["test"]})
    small = (
        f"--model={tmp_path / 'model'}",
        f"--dataset_dir={tmp_path / 'data'}",
        "--repeats=1",
        "--peak_tflops=0.1",
        "--dtype=float32",
    )
    report = run("encode_throughput", "--max_query_length=12", "--max_doc_length=12", "--peer_dtypes", "float32", small=small)
    for kind, num_texts in (("passages", 10), ("queries", 3)):
        assert report[kind]["num_texts"] == num_texts
        assert report[kind]["min_cosine"]["peer_float32"] > 0.9999
    report = run("step_time", "--batch_size=2", "--num_batches=1", "--doc_length=12", "--optimizer=adamw", small=small)
    assert report["first_loss"]["ours"] > 0
    assert abs(report["first_loss_apart"]["peer"]) < 1e-4
    assert report["doc_length"]["longest"] <= 12


def test_runs_alternate_and_ratios_are_taken_within_a_repeat():
    order = []
    seconds = measure.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 5
    assert [len(values) for values in seconds.values()] == [3, 3]
    ratios = measure.speedup({"a": [1.0, 2.0, 1.0], "b": [2.0, 2.0, 3.0]}, "a", "b")
    assert ratios == {"median": 2.0, "min": 1.0, "max": 3.0}


@pytest.mark.soak
def test_the_memory_of_an_evaluation_is_measured_in_a_process_of_its_own():
    sizes = ["--num_docs=300", "--num_queries=20", "--doc_words=20"]
    command = [sys.executable, "-m", "benchmarks.evaluation_memory", *sizes]
    (line,) = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    report = json.loads(line)
    assert report.keys() >= ENVIRONMENT | {"peak_mib", "seconds"}
    assert 50 < report["peak_mib"] < 4096


@pytest.mark.soak
def test_generation_stands_beside_transformers_with_the_same_texts(run):
    sizes = ("--num_docs", "3", "--docs_per_batch", "2", "--num_queries", "2", "--max_length", "3", "--num_compared", "2")
    report = run("generate_throughput", *sizes, "--repeats", "1", small=())
    assert report.keys() >= ENVIRONMENT
    assert report["queries_per_second"].keys() == {"ours", "transformers"}
    assert report["share_of_equal_greedy_texts"] == 1


def test_relevance_stands_beside_rouge_score_with_the_same_numbers(run, tmp_path):
    beir.write(tmp_path, [("d", "", "text")], [(f"q{i}", f"some words of number {i}") for i in range(9)], {})
    report = run(
        "relevance_throughput", "--dataset_dir", str(tmp_path), "--num_pairs", "3", "--num_queries", "4", "--repeats", "1", small=()
    )
    assert report.keys() >= ENVIRONMENT - {"sizes"}
    assert report["equal"]
    assert report["speedup"]["median"] > 0


@pytest.mark.soak
def test_a_negative_cache_takes_the_memory_that_was_predicted(run):
    sizes = ("--batch_size", "4", "--query_length", "8", "--doc_length", "16", "--embedding_dim", "8", "--capacity", "1024")
    small = ("--model=tiny", "--repeats=1", "--num_steps=1", "--num_negatives=2", "--gin=make_mesh.data=1", ONE_LAYER)
    report = run("negative_cache", *sizes, small=small)
    assert report.keys() >= ENVIRONMENT | {"steps_per_second", "temporaries_gib"}
    assert report["slowdown"].keys() == {"plain", "mined"}
    assert report["arguments_gib"] == report["predicted_gib"] == round(1024 * 4 * (16 + 8 + 4) / 2**30, 6)


@pytest.mark.soak
def test_the_memory_of_an_import_is_measured_in_a_process_of_its_own():
    command = [sys.executable, "-m", "benchmarks.import_memory", "--num_rows=50"]
    (line,) = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    report = json.loads(line)
    assert report.keys() >= ENVIRONMENT - {"sizes"} | {"peak_mib", "cpu_seconds"}
    assert (report["train_pairs"], report["docs"]) == (50, 100)


def test_a_switch_of_negatives_is_timed_by_a_thread_and_by_the_loop(run):
    sizes = ("--num_pairs", "60", "--num_docs", "90", "--num_negatives", "3", "--step_seconds", "0.0005")
    report = run("negatives_switch", *sizes, small=())
    assert report.keys() >= ENVIRONMENT - {"sizes"} | {"speedup"}
    for form in ("thread", "loop"):
        assert report[form]["num_steps"] >= 18  # a look at the tenth, and eight more until it gives a batch
        assert report[form]["hook_ms"].keys() == {"longest", "sum", "cpu"}


def test_the_disk_and_memory_of_generated_queries_are_multiplied_by_a_corpus(run, tmp_path):
    sizes = ("--num_docs", "40", "--num_queries", "5", "--num_reads", "20", "--num_pairs", "10", "--full_corpus", "400")
    report = run("expansion_memory", *sizes, f"--full_store={tmp_path / 'full'}", "--num_batches", "2", small=())
    assert report.keys() >= ENVIRONMENT - {"sizes"} | {"bytes_a_doc", "read_microseconds"}
    assert report["of_full_corpus"]["disk_gib"] == round(report["bytes_a_doc"] * 400 / 2**30, 2)
    assert report["full_store"]["num_queries"] == 5 * 400
    assert report["num_pairs"] == 10
    assert report["memory_mib"].keys() == report["seconds"].keys() == {"import", "store", "open", "ranking"}
    assert report["letters_a_query"] == 6 * 5 + 5
