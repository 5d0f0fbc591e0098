"""MTEB's adapter against what mteb's evaluator calls: batches, keywords of the task, either tower."""

import enum

import numpy as np
import pytest

from de_jax.mteb import Model


class PromptType(enum.StrEnum):
    """As mteb has it."""

    query = "query"
    document = "document"


class Towers:
    """Embeddings that say which tower made them, and of what."""

    def encode_query(self, texts):
        return np.array([[1.0, len(text)] for text in texts], np.float32)

    def encode_document(self, texts):
        return np.array([[2.0, len(text)] for text in texts], np.float32)


BATCHES = [{"text": ["a", "four"], "title": ["t", "t"], "body": ["a", "four"]}, {"text": ["longest"]}]
OF_THE_TASK = {"task_metadata": object(), "hf_split": "test", "hf_subset": "default", "batch_size": 2, "show_progress_bar": False}


@pytest.mark.parametrize(
    ("prompt_type", "others", "tower"),
    [
        (PromptType.query, "document", 1.0),
        (PromptType.document, "query", 2.0),
        ("query", "document", 1.0),
        (None, "document", 2.0),
        (None, "query", 1.0),
    ],
)
def test_each_text_is_embedded_in_order_by_the_tower_of_its_kind(prompt_type, others, tower):
    model = Model(Towers(), name="my-org/towers", others=others)
    found = model.encode(iter(BATCHES), prompt_type=prompt_type, **OF_THE_TASK)
    np.testing.assert_array_equal(found, [[tower, 1.0], [tower, 4.0], [tower, 7.0]])


def test_similarities_are_inner_products():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    model = Model(Towers(), name="my-org/towers")
    scores = model.similarity(first, second.tolist())
    expected = [[sum(float(a) * float(b) for a, b in zip(x, y, strict=True)) for y in second] for x in first]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    np.testing.assert_allclose(model.similarity_pairwise(first, second), np.diag(scores), atol=1e-5)
