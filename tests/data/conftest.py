"""The real data of a development machine, and a tokenizer that needs none of it."""

import pytest
from real_data import SHARED_DATA

from de_jax.data import text


@pytest.fixture
def shared_data():
    return SHARED_DATA


@pytest.fixture(scope="session")
def spiece(tmp_path_factory):
    """A folder with a small sentencepiece vocabulary."""
    folder = tmp_path_factory.mktemp("spiece")
    words = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "boxed", "vex")
    texts = [f"{first} {second} {third}" for first in words for second in words for third in words[:3]]
    text.train_sentencepiece(texts, folder / "spiece.model", vocab_size=36)
    return folder


@pytest.fixture(scope="session")
def tokenizer(spiece):
    return text.load_tokenizer(spiece)
