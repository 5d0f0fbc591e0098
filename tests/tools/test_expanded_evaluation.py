"""Documents with generated queries, as every evaluation command ranks them: against embeddings taken one by one."""

import functools
import json

import jax
import numpy as np
import pytest
import tiny_run

from de_jax import cli
from de_jax.data.text import beir
from de_jax.retrieval.embedding_files import EmbeddingWriter
from de_jax.retrieval.expanded_search import typical
from de_jax.retrieval.searcher import padded_tokens
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError

WORDS = tiny_run.WORDS
GENERATED = {f"d{i}": [f"{WORDS[(i + 1) % 10]} {WORDS[i]}", "the sea", "", "red den"][: 1 + i % 4] for i in range(9)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("expanded")
    tiny_run.write_dataset(root / "data")
    tiny_run.write_run(root)
    lines = [json.dumps({"_id": doc_id, "queries": queries}) for doc_id, queries in GENERATED.items()]  # d9 has none
    (root / "expansion.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    monkeypatch.setenv("DE_JAX_CACHE", str(folder / "cache"))


def report(folder, capsys, *options):
    arguments = [f"--run_dir={folder / 'run'}", f"--dataset_dir={folder / 'data'}", "--measures", "nDCG@10", *options]
    cli.call(
        "evaluate beir", [*arguments, "--dtype=float32", f"--expansion={folder / 'expansion.jsonl'}", "--max_generated_length=6"]
    )
    return json.loads(capsys.readouterr().out)


@functools.cache
def by_hand(folder, num_generated, form):
    """The score of every document for every query, from texts that are put together token by token."""
    run = load_run(folder / "run")
    tokenizer, encode_doc = run.doc.tokenizer, jax.jit(run.model.encode_doc)

    def embedding(doc, queries):
        (doc, *queries) = [tokenizer.encode([text])[0].tolist() for text in (doc, *queries)]
        queries = [query[:6] for query in queries]
        end = list(tokenizer.suffix_ids)
        tail = [token for query in queries for token in (*end, *query)] + end
        tokens = doc[: run.doc.max_length - len(tail)] + tail
        padded = np.array([tokens + [0] * (run.doc.max_length - len(tokens))], np.int32)
        return np.asarray(encode_doc(run.params, padded))[0]

    vectors = []
    for doc_id, title, text in tiny_run.DOCS:
        usable = [query for query in dict.fromkeys(GENERATED.get(doc_id, [])) if query][:num_generated]
        groups = [usable] if form == "document" else [[query] for query in usable] or [[]]
        vectors.append(np.stack([embedding(f"{title} {text}", group) for group in groups]))
    queries = [text for query_id, text in tiny_run.QUERIES if query_id in tiny_run.QRELS["test"]]
    tokens, lengths = padded_tokens(run.query.tokenizer, queries, max_length=16, length_multiple=8)
    queries = np.asarray(run.model.encode_rows("query", run.params, tokens, lengths=lengths))[:, 0]
    if form.startswith("typical"):
        means = np.stack([own.mean(axis=0) for own in vectors])
        return queries @ (means / np.linalg.norm(means, axis=1, keepdims=True) if form == "typical" else means).T
    return np.stack([(queries @ own.T).max(axis=1) for own in vectors], axis=1)


@pytest.mark.parametrize(
    ("form", "num_vectors"),
    [("views", 16), *((form, 10) for form in ("typical", "typical_as_is", "document"))],
)
@pytest.mark.soak
@pytest.mark.short_soak
def test_documents_rank_as_their_expanded_texts_say(folder, capsys, form, num_vectors):
    found = report(folder, capsys, "--no_bm25", f"--expand_as={form}", "--num_generated=2", "--keep_identical_ids")
    assert found["cost"]["num_vectors"] == num_vectors
    assert found["cost"]["bytes"] == 4 * 8 * num_vectors
    with open(f"{found['evaluation_dir']}/dense.trec") as file:
        lines = [line.split() for line in file]
    scores = by_hand(folder, 2, form)
    for row, query_id in enumerate(("q0", "d3")):
        ranked = [(line[2], float(line[4])) for line in lines if line[0] == query_id]
        assert len(ranked) == 10
        for doc_id, score in ranked:
            np.testing.assert_allclose(score, scores[row, int(doc_id[1:])], atol=2e-5)


def test_bm25_reads_the_same_queries_and_reports_are_kept_apart(folder, capsys):
    expanded = report(folder, capsys, "--num_generated=1")
    cli.call("evaluate beir", [f"--dataset_dir={folder / 'data'}", "--measures", "nDCG@10"])
    plain = json.loads(capsys.readouterr().out)
    beir.write(
        folder / "by_hand",
        [(doc_id, title, " ".join([text, *GENERATED.get(doc_id, [])[:1]])) for doc_id, title, text in tiny_run.DOCS],
        tiny_run.QUERIES,
        tiny_run.QRELS,
    )
    cli.call("evaluate beir", [f"--dataset_dir={folder / 'by_hand'}", "--measures", "nDCG@10"])
    assert expanded["bm25"] == json.loads(capsys.readouterr().out)["bm25"]
    assert expanded["evaluation_dir"] != report(folder, capsys, "--num_generated=2")["evaluation_dir"]
    assert "expansion" not in plain["settings"]


def test_a_mean_is_that_of_each_documents_views():
    rows = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    docs = np.array([0, 0, 0, 1, 2, 2, 2])
    expected = np.stack([rows[docs == doc].mean(axis=0) for doc in range(3)])
    np.testing.assert_allclose(typical(rows, docs, normalize=False), expected, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(typical(rows, docs, normalize=True), axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--num_generated=0"], "--num_generated is 0; it must be at least 1"),
        (["--passage_length=8"], "--passage_length changes nothing beside --expansion"),
        (["--max_passages=2"], "set max_passages to 1"),
    ],
)
def test_what_is_no_expansion_is_refused(folder, capsys, options, sentence):
    with pytest.raises(InputError, match=sentence):
        report(folder, capsys, *options)


@pytest.mark.parametrize(
    "form", ["views", "typical", *(pytest.param(form, marks=pytest.mark.soak) for form in ("typical_as_is", "document"))]
)
@pytest.mark.soak
def test_a_written_index_of_expanded_documents_searches_as_they_are_scored(folder, capsys, tmp_path, monkeypatch, form):
    options = [f"--run_dir={folder / 'run'}", f"--dataset_dir={folder / 'data'}", "--dtype=float32"]
    expansion = [f"--expansion={folder / 'expansion.jsonl'}", f"--expand_as={form}"]
    arguments = [*options, *expansion, "--num_generated=2", "--max_generated_length=6", "--texts_per_shard=4"]
    cli.call("encode corpus", [*arguments, f"--out_dir={tmp_path / 'whole'}"])
    report = json.loads(capsys.readouterr().out)
    assert report["num_vectors"] == (16 if form == "views" else 10)
    cli.call("search", [*options, f"--embeddings_dir={tmp_path / 'whole'}", "--query", tiny_run.QUERIES[0][1], "--k=10"])
    found = {result["id"]: result["score"] for result in json.loads(capsys.readouterr().out)["results"]}
    assert len(found) == 10
    for doc_id, score in found.items():
        np.testing.assert_allclose(score, by_hand(folder, 2, form)[0, int(doc_id[1:])], atol=2e-5)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        append, appended = EmbeddingWriter.append, []
        patched.setattr(EmbeddingWriter, "append", lambda *args: killed() if len(appended) == 2 else appended.append(append(*args)))
        with pytest.raises(KeyboardInterrupt):
            cli.call("encode corpus", [*arguments, f"--out_dir={tmp_path / 'killed'}"])
    cli.call("encode corpus", [*arguments, f"--out_dir={tmp_path / 'killed'}"])
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "killed" / path.name).read_bytes()
    with pytest.raises(InputError, match="choose another folder"):
        cli.call("encode corpus", [*options, *expansion, "--num_generated=1", f"--out_dir={tmp_path / 'whole'}"])
