import itertools
import math

import numpy as np
import pytest

from de_jax.evaluation import geometry
from de_jax.types import InputError
from reproduction import embedding_geometry


def unit_rows(rows):
    return [row / np.linalg.norm(row) for row in rows.astype(np.float64)]


@pytest.fixture
def rows():
    return np.random.default_rng(0).standard_normal((30, 6)).astype(np.float32)


def test_measures_equal_loops_over_pairs(rows, monkeypatch):
    monkeypatch.setattr(geometry, "BLOCK_ROWS", 7)
    unit = unit_rows(rows)
    pairs = list(itertools.combinations(unit, 2))
    potential = np.mean([math.exp(-2 * np.sum((x - y) ** 2)) for x, y in pairs])
    assert geometry.uniformity(rows) == pytest.approx(math.log(potential), abs=1e-9)
    docs = rows[::-1].copy()
    distances = [np.sum((x - y) ** 2) for x, y in zip(unit, unit[::-1], strict=True)]
    assert geometry.pair_alignment(rows, docs) == pytest.approx(np.mean(distances), abs=1e-9)


def test_measures_do_not_see_the_length_of_a_row(rows):
    scaled = rows * np.linspace(0.1, 9, 30, dtype=np.float32)[:, None]
    assert geometry.uniformity(scaled) == pytest.approx(geometry.uniformity(rows), abs=1e-5)
    assert geometry.pair_alignment(scaled, rows) == pytest.approx(0, abs=1e-9)


def test_collapsed_embeddings_have_the_extreme_values():
    rows = np.tile(np.array([[3.0, 4.0, 0.1]], np.float32), (50, 1))
    assert geometry.uniformity(rows) == pytest.approx(0, abs=1e-9)
    assert embedding_geometry.effective_rank(rows) == 0


def test_opposite_pairs_are_four_apart():
    rows = np.eye(3, dtype=np.float32)
    assert geometry.pair_alignment(rows, -rows) == pytest.approx(4)


def test_effective_rank_counts_equally_used_dimensions():
    for dim in (1, 2, 5):
        corners = np.concatenate([np.eye(8, dtype=np.float32)[:dim], -np.eye(8, dtype=np.float32)[:dim]])
        assert embedding_geometry.effective_rank(corners + 7) == pytest.approx(dim, abs=1e-4)


def test_too_few_rows_are_refused():
    one = np.ones((1, 3), np.float32)
    for measure in (geometry.uniformity, embedding_geometry.effective_rank):
        with pytest.raises(InputError, match="1 embeddings have no pairs"):
            measure(one)
    with pytest.raises(InputError, match="aligned by row"):
        geometry.pair_alignment(one, np.ones((2, 3), np.float32))
