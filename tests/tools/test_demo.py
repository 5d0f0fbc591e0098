"""The page to try a model, without Gradio: rankings, marks, HTML and messages."""

import asyncio
import functools
import json
import socket
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_run import DOCS, QUERIES

import de_jax
from de_jax import cli
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import field_of
from de_jax.demo import gradio_page
from de_jax.demo.side_by_side import Column, Hit, Mark, SideBySide, doc_saliency, open_corpus, strongest
from de_jax.evaluation import fusion
from de_jax.evaluation import task as task_
from de_jax.evaluation.saliency import token_saliency
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</summary></details><iframe src='//evil.example'>",
    '"\' onmouseover=alert(1) x="',
    "${alert(1)} {{constructor.constructor('alert(1)')()}} `x` @children",
    "&lt;b&gt; &#60;script&#62;",
    "dexe\u202etxt\x1b[2J\u2028",
]


@pytest.fixture(scope="module")
def systems(trained, dataset_dir, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        load = functools.partial(de_jax.load, trained, dtype="float32")
        models = {"trained": load(), "earlier": load(step=3, devices=1)}
        return SideBySide(open_corpus(dataset_dir), models)


@pytest.mark.soak
@pytest.mark.short_soak
def test_the_columns_are_the_rankings_that_evaluate_beir_scores(systems, trained, dataset_dir):
    (task,), policy = task_.beir_tasks(dataset_dir, "test"), task_.Policy(drop_identical_ids=False)
    expected = [
        task_.bm25_results(task, policy),
        *(task_.ranked(task_.encoded(load_run(trained, step), task, policy), policy) for step in (7, 3)),
    ]
    expected.insert(2, fusion.fuse(expected[1::-1], depth=10))
    for query_id, query in QUERIES[:2]:
        columns = systems.search(query, 10)
        assert [(column.system, column.about) for column in columns[1::2]] == [("Dense", "trained"), ("Dense 2", "earlier")]
        for column, results in zip(columns, expected, strict=True):
            found = {hit.doc_id: hit.score for hit in column.hits}
            assert list(found) == list(results[query_id])
            assert found == pytest.approx(results[query_id], abs=1e-5)
        assert columns[2].milliseconds >= columns[0].milliseconds + columns[1].milliseconds > 0
        ranks = {hit.doc_id: rank for rank, hit in enumerate(columns[1].hits, start=1)}
        assert {hit.doc_id: hit.ranks["dense"] for hit in columns[2].hits} == ranks
    assert columns[1].hits != columns[3].hits


@pytest.mark.soak
def test_marks_are_words_of_the_query_and_the_tokens_with_the_largest_saliency(systems):
    columns = systems.search("red fox", 3)
    bm25, dense, fused, other = systems.marked("red fox", columns)
    assert [
        column._replace(hits=[hit._replace(marks=()) for hit in column.hits]) for column in (bm25, dense, fused, other)
    ] == columns
    for hit in bm25.hits:
        assert {hit.text[mark.begin : mark.end] for mark in hit.marks} <= {"red", "fox"}
        assert hit.marks
    of_dense = {hit.doc_id: hit.marks for hit in dense.hits}
    assert all(of_dense.get(hit.doc_id, hit.marks) == hit.marks for hit in fused.hits)
    for column in (dense, other):
        for hit in column.hits:
            assert max(mark.strength for mark in hit.marks) == 1
    assert other.hits[0].marks != dense.hits[0].marks


@pytest.mark.soak
def test_the_saliency_of_a_document_is_that_of_its_best_passage(systems, trained):
    model = de_jax.load(trained)
    model.run = model.run._replace(doc=model.run.doc._replace(max_length=6, max_passages=3))
    text = " ".join(title for _, title, _ in DOCS)
    ids = model.run.doc.tokenizer.encode([text])[0]
    query = np.eye(1, 8, dtype=np.float32)
    ((place, found),) = doc_saliency(model, query, [text])
    tokens = np.zeros((4, 64), np.int32)
    for passage in range(3):
        tokens[passage, :6] = [*ids[5 * passage : 5 * passage + 5], 1]
    scores, expected = token_saliency(model.run.model, model.run.params, "doc", tokens, np.repeat(query, 4, axis=0))
    best = int(np.argmax(scores[:3]))
    assert place == 5 * best
    np.testing.assert_allclose(found, expected[best, :5], atol=1e-5)


def test_tokens_of_a_word_are_marked_together_and_weak_words_are_not():
    assert strongest("aé b", [(0, 2), (1, 2), (1, 2), (2, 4)], [0.0, 3.0, 4.0, 0.9]) == [Mark(0, 2, 1.0)]
    assert strongest("語" * 40, [(0, 3), (3, 5)], [1.0, 0.5]) == [Mark(0, 3, 1.0), Mark(3, 5, 0.5)]
    assert strongest("a-b, c", [(0, 1), (1, 2), (2, 4), (4, 6)], [1.0] * 4) == [
        Mark(*span, 1.0) for span in [(0, 1), (1, 2), (2, 4), (5, 6)]
    ]
    assert strongest("a b", [(0, 1), (1, 3)], [0.0, 0.0]) == []
    assert len(strongest("a " * 30, [(2 * i, 2 * i + 1) for i in range(30)], np.ones(30))) == 12


class Parsed(HTMLParser):
    """The tags, attributes and texts of HTML."""

    def __init__(self, markup):
        super().__init__()
        self.tags, self.attributes, self.texts, self.links = set(), set(), [], []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.links += [value for name, value in attrs if name == "href"]

    def handle_data(self, data):
        self.texts.append(data)


def test_nothing_that_a_corpus_a_query_or_a_file_name_holds_is_interpreted():
    urls = [
        "javascript:alert(1)",
        "https://example.org/?a=1&b=\"><script>'",
        " https://x",
        "https://[",
        "data:text/html,x",
        "//x.org",
        "",
    ]
    hits = [
        Hit(f"id {text}", 1.0, text, f"{text} and {text}", url, {text: 1}, [Mark(0, 3, 1.0), Mark(4, 6, 0.5)])
        for text, url in zip(HOSTILE, urls, strict=True)
    ]
    shown = gradio_page.results([Column(text, text, 1.0, hits) for text in HOSTILE[:2]]) + gradio_page.refusal(HOSTILE[0])
    shown += gradio_page.headline(HOSTILE[1], 3, HOSTILE)
    parsed = Parsed(shown)
    assert parsed.tags <= {"style", "div", "section", "h2", "h3", "span", "p", "b", "a", "details", "summary", "mark"}
    assert parsed.attributes <= {"class", "style", "href", "target", "rel", "title", "role"}
    assert set(parsed.links) == {urls[1]}
    texts = "".join(parsed.texts)
    for text in HOSTILE[:-1]:
        assert text in texts
    assert "dexetxt[2J " in texts
    for character in "\x1b\u202e\u2028":
        assert character not in shown
    assert not set("{}$`@") & set(shown.replace(gradio_page.STYLE, ""))


@pytest.mark.parametrize(
    ("query", "k", "message"),
    [
        (" ", 3, "the query is empty"),
        (None, 3, "the query is empty"),
        ("x" * 301, 3, "the query has 301 characters; give at most 300"),
        ("fox", 0, "the number of results is 0; give 1 to 20"),
        ("fox", 1e9, "the number of results is 1000000000.0; give"),
        ("fox", float("nan"), "the number of results is nan"),
        ("fox", "9", "the number of results is &#x27;9&#x27;"),
        ("<b>" * 101, 3, "has 303 characters"),
    ],
)
def test_inputs_are_bounded_and_the_page_says_how(systems, query, k, message):
    (shown,) = gradio_page.answers(systems, query, k)
    assert message in shown


@pytest.mark.soak
def test_a_request_of_a_wrong_type_is_answered_with_a_sentence_and_leaves_no_traceback():
    class Error(Exception):
        def __init__(self, message, print_exception):
            assert not print_exception
            super().__init__(message)

    async def preprocess_data(block, inputs):
        return [inputs[0], inputs[1] > 1]  # as Gradio's slider compares

    read = gradio_page._refusing(SimpleNamespace(Error=Error), preprocess_data)
    assert asyncio.run(read("block", ["a", 5])) == ["a", True]
    for inputs in (["a", "5"], ["a"], []):
        with pytest.raises(Error, match=r"send a query and a number of results from 1 to 20\."):
            asyncio.run(read("block", inputs))


def test_the_page_gets_results_first_and_marks_after(systems):
    first, second = gradio_page.answers(systems, "red fox", 2)
    assert (first.count("<mark") < second.count("<mark")) == (first.count('dj-hit"') == second.count('dj-hit"') == 8)


def test_examples_are_queries_of_the_test_split_if_there_is_one(systems, tmp_path):
    assert systems.corpus.examples == ["red fox", "deep blue sea"]
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d", "text": "fox", "url": "https://example.org"}\n')
    assert open_corpus(tmp_path) == (tmp_path / "corpus.jsonl", {"d": "fox"}, [])
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps({"_id": str(i), "text": "a" * 30 * i}) + "\n" for i in range(1, 9)))
    assert [len(query) for query in open_corpus(tmp_path).examples] == [30, 60, 90, 120]


def test_titles_and_urls_come_from_every_form_of_a_corpus(tmp_path):
    rows = [
        {"_id": "a", "title": " T ", "text": "x", "url": "u"},
        {"_id": "b", "text": "x", "metadata": {"url": "v"}},
        {"_id": "c", "text": "x", "url": 3, "metadata": []},
    ]
    about = lambda path: {name: (field_of(text, "title"), field_of(text, "url")) for name, text in beir.iter_docs(path)}  # noqa: E731
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert about(tmp_path / "c.jsonl") == {"a": ("T", "u"), "b": ("", "v"), "c": ("", "")}
    (tmp_path / "c.tsv").write_text("a\thttp://u\tT\tx\nb\tx\n")
    assert about(tmp_path / "c.tsv") == {"a": ("T", "http://u"), "b": ("", "")}


def test_what_is_wrong_is_said_before_a_model_loads(dataset_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(gradio_page, "load", None)
    flags = [f"--run_dir={tmp_path}", f"--dataset_dir={dataset_dir}"]
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(InputError, match=r"needs the package gradio; run pip install 'de-jax-retrieval\[demo\]'\.$"):
        cli.call("demo", flags)
    monkeypatch.setitem(sys.modules, "gradio", sys)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InputError, match=rf"^port {port} of 127\.0\.0\.1 cannot be used: Address already in use; give another"):
            cli.call("demo", [*flags, f"--port={port}"])
    for wrong, message in {
        "--host=192.0.2.7": r"^port 7860 of 192\.0\.2\.7 cannot be used: Cannot assign requested address",
        "--port=65536": "^--port is 65536; it must be",
        "--compare_step=3": "^--compare_step changes nothing without --compare",
    }.items():
        with pytest.raises(InputError, match=message):
            cli.call("demo", [*flags, wrong])
    with pytest.raises(InputError, match="holds no corpus"):
        cli.call("demo", [flags[0], f"--dataset_dir={tmp_path}"])


def test_the_same_model_twice_is_refused_and_two_steps_of_a_run_are_not(dataset_dir, monkeypatch):
    def load(source, step, backend):
        return SimpleNamespace(run=SimpleNamespace(step=step or 7, source=None if "run" in source else source))

    monkeypatch.setitem(sys.modules, "gradio", sys)
    monkeypatch.setattr(gradio_page, "load", load)
    monkeypatch.setattr(gradio_page, "SideBySide", lambda corpus, models, skip_empty: models)
    monkeypatch.setattr(gradio_page, "_blocks", lambda gradio, systems, names: list(systems) == names and names)
    with pytest.raises(InputError, match=r"^a/run, step 7 is given twice; compare it with another model or step"):
        gradio_page.page("a/run", dataset_dir, compare="a/run", compare_step=7)
    assert gradio_page.page("a/run", dataset_dir, compare="a/run", compare_step=3) == ["run, step 7", "run, step 3"]
    assert gradio_page.page("a/run", dataset_dir, compare="b/run") == ["a/run, step 7", "b/run, step 7"]
    assert gradio_page.page("a/run", dataset_dir, compare="b/MiniLM") == ["run, step 7", "MiniLM"]
