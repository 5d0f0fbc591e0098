import json
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread

from de_jax.types import InputError
from reproduction import embedding_geometry, embedding_report
from reproduction.embedding_analysis import Texts, analyse


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def make_texts(num_queries=30, num_docs=80, dim=8, noise=0.4):
    """Documents at random, and for each of the first a query near it."""
    rng = np.random.default_rng(0)
    docs = unit(rng.standard_normal((num_docs, dim)))
    queries = unit(docs[:num_queries] + noise * rng.standard_normal((num_queries, dim)))
    qrels = {f"q{i}": {f"d{i}": 1, f"d{(i + 1) % num_docs}": 0} for i in range(num_queries)}
    return Texts([f"q{i}" for i in range(num_queries)], [f"d{i}" for i in range(num_docs)], queries, docs, qrels)


def test_distances_equal_loops_over_pairs():
    texts = make_texts()
    rows = [row.astype(np.float64) for row in texts.queries]
    both = [1 - np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) for i, a in enumerate(rows) for b in rows[i + 1 :]]
    np.testing.assert_allclose(embedding_geometry.pair_distances(texts.queries), both, atol=1e-6)
    assert embedding_geometry.pair_distances(texts.queries, texts.docs).shape == (30 * 80,)
    others = [np.mean([1 - np.dot(a, b) for j, b in enumerate(rows) if i != j]) for i, a in enumerate(rows)]
    np.testing.assert_allclose(embedding_geometry.detaching_distances(texts.queries), others, atol=1e-6)


def test_recall_frequency_counts_the_first_ranks():
    results = {"a": {"x": 3.0, "y": 2.0, "z": 1.0}, "b": {"x": 2.0, "z": 1.0}}
    assert embedding_geometry.recall_frequency(results, ["x", "y", "z", "w"], depth=2).tolist() == [2, 1, 1, 0]
    assert embedding_geometry.recall_frequency(results, ["x", "y", "z", "w"]).tolist() == [2, 1, 2, 0]


def test_numbers_are_those_of_loops():
    texts = make_texts()
    found = analyse(texts, depth=100)
    scores = texts.queries @ texts.docs.T
    np.testing.assert_allclose(found.top_cosines, scores.max(axis=1), atol=1e-5)
    np.testing.assert_allclose(found.pair_cosines, np.diag(scores), atol=1e-5)
    ranks = (scores > np.diag(scores)[:, None]).sum(axis=1)
    ndcg = np.where(ranks < 10, 1 / np.log2(ranks + 2), 0)
    assert found.numbers["ndcg@10"]["query to document"] == pytest.approx(ndcg.mean(), abs=1e-4)
    backward = (scores[:, :30] > np.diag(scores)[None, :]).sum(axis=0)
    ndcg_backward = np.where(backward < 10, 1 / np.log2(backward + 2), 0)
    assert found.numbers["ndcg@10"]["document to query"] == pytest.approx(ndcg_backward.mean(), abs=1e-4)
    top = {row for query in np.argsort(-scores, axis=1)[:, :10].tolist() for row in query}
    shares = {"unique_share": pytest.approx(len(top) / 300, rel=1e-4), "share_of_documents": pytest.approx(len(top) / 80, rel=1e-4)}
    assert found.numbers["retrieved"] == {"depth": 10, **shares}
    assert found.ranks[0] == 1
    assert found.ranks[-1] == 80
    assert (np.diff(found.scores, axis=1) <= 0).all()


def test_groups_share_out_all_texts_and_their_quality():
    texts = make_texts()
    groups = analyse(texts).numbers["groups"]
    for direction, total in (("query to document", 30), ("document to query", 30)):
        for grouping in ("recall_frequency", "detaching_distance"):
            found = list(groups[direction][grouping].values())
            assert sum(group["number"] for group in found) == total
            mean = sum(group["number"] * (group["ndcg@10"] or 0) for group in found) / total
            assert mean == pytest.approx(analyse(texts).numbers["ndcg@10"][direction], abs=1e-3)
        thirds = groups[direction]["detaching_distance"]
        assert [group["number"] for group in thirds.values()] == [10, 10, 10]
        distances = [group["detaching_distance"] for group in thirds.values()]
        assert distances == sorted(distances)
    assert groups["query to document"]["depth_of_recall"] == 2


def test_frequency_groups_are_those_of_the_other_direction():
    texts = make_texts(noise=0.01)  # each document finds its own query first
    groups = analyse(texts, depth=1).numbers["groups"]
    once = {name: group["number"] for name, group in groups["query to document"]["recall_frequency"].items()}
    assert once == {"never": 0, "once": 30, "twice": 0, "more often": 0}


def test_one_space_has_ratios_around_one():
    texts = make_texts(noise=1e-4)
    assert analyse(texts).numbers["similarity_ratio"]["p50"] == pytest.approx(1, abs=1e-2)


@pytest.mark.soak
def test_the_same_seed_gives_the_same_numbers_and_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        embedding_report.draw(analyse(make_texts(), seed=3), tmp_path / name, seed=3)
    assert analyse(make_texts(), seed=3).numbers == analyse(make_texts(), seed=3).numbers
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_too_few_pairs_are_refused():
    texts = make_texts(num_queries=2)
    with pytest.raises(InputError, match="2 queries have a relevant document"):
        analyse(texts)


class Sources(HTMLParser):
    """What a page refers to."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href")]


@pytest.mark.soak
def test_the_report_holds_its_pictures_and_asks_no_network(tmp_path):
    found = analyse(make_texts())
    pictures = embedding_report.draw(found, tmp_path)
    assert {picture.file for picture in pictures} == {file.name for file in tmp_path.iterdir()}
    for picture in pictures:
        assert imread(tmp_path / picture.file)[..., :3].std() > 0.01
    embedding_report.write(found, tmp_path, "a <run>", {"run": "runs/a&b"})
    page = (tmp_path / "report.html").read_text()
    sources = Sources()
    sources.feed(page)
    assert len(sources.found) == len(pictures)
    assert all(source.startswith("data:image/png;base64,") for source in sources.found)
    assert "a &lt;run&gt;" in page
    assert "runs/a&amp;b" in page
    assert f"{found.numbers['alignment']:.4g}" in page
    json.dumps(found.numbers, allow_nan=False)


def test_groups_without_texts_are_drawn(tmp_path):
    texts = make_texts(noise=0.01)
    embedding_report.draw(analyse(texts, depth=1), tmp_path)
    assert (tmp_path / "groups.png").is_file()
