import numpy as np
import pytest

from de_jax.data.text import near_duplicates

WORDS = [f"word{number}" for number in range(400)]


def random_text(rng, length=60):
    return [WORDS[i] for i in rng.integers(0, len(WORDS), length)]


def keep(texts, max_resemblance=0.6):
    return near_duplicates.keep((near_duplicates.shingles(" ".join(words)) for words in texts), max_resemblance=max_resemblance)


def naive_shingles(words):
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def naive_keep(texts, max_resemblance):
    kept = []
    for position, words in enumerate(texts):
        mine = naive_shingles(words)
        others = [naive_shingles(texts[other]) for other in kept]
        if all(len(mine & other) / len(mine | other) <= max_resemblance for other in others):
            kept.append(position)
    return kept


def test_shingles_are_distinct_sequences_of_three_words_whatever_their_case():
    words = "The cat, the CAT; the cat sat".lower().replace(",", "").replace(";", "").split()
    assert len(near_duplicates.shingles("The cat, the CAT; the cat sat")) == len(naive_shingles(words)) == 3
    np.testing.assert_array_equal(near_duplicates.shingles("A b c."), near_duplicates.shingles("a B  c"))
    assert near_duplicates.shingles("a b c").tolist() != near_duplicates.shingles("c b a").tolist()
    assert len(near_duplicates.shingles("")) == len(near_duplicates.shingles("two words")) == 1


def test_the_first_of_near_duplicates_is_kept():
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(60):
        words = random_text(rng)
        changed = words.copy()
        changed[30] = "changed"
        texts += [words, changed, random_text(rng)]
    kept = keep(texts)
    assert kept == naive_keep(texts, 0.6)
    assert kept == [position for position in range(len(texts)) if position % 3 != 1]


def test_texts_that_share_less_are_all_kept():
    rng = np.random.default_rng(1)
    shared = random_text(rng, 30)
    texts = [shared + random_text(rng, 40) for _ in range(50)]
    assert keep(texts) == list(range(50))


def test_a_dropped_text_drops_no_other():
    rng = np.random.default_rng(2)
    words = random_text(rng, 100)
    chain = [words[start : start + 60] for start in (0, 11, 22)]  # neighbours share 47 of 69 shingles, the ends 36 of 80
    assert keep(chain) == naive_keep(chain, 0.6) == [0, 2]


@pytest.mark.parametrize("tokens_at_once", [50, 1 << 21])
@pytest.mark.parametrize("limit", [0.0, 0.3, 0.9])
def test_resemblances_of_many_pairs_are_those_of_their_sets(monkeypatch, tokens_at_once, limit):
    monkeypatch.setattr(near_duplicates, "_TOKENS", tokens_at_once)
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 6 if length < 9 else 300, length).tolist() for length in (1, 2, 3, 4, 5, 8, 40, 90, 400, 400)]
    texts += [[*text[:place], 7, *text[place + 1 :]] for text in texts for place in (0, len(text) // 2)]
    tokens, offsets = np.concatenate(texts).astype(np.int32), np.concatenate([[0], np.cumsum(list(map(len, texts)))])
    sets = [naive_shingles(text + [0] * (3 - len(text))) for text in texts]
    first, second = (rows.reshape(-1) for rows in np.meshgrid(*[np.arange(len(texts))] * 2))
    expected = [len(sets[one] & sets[two]) / len(sets[one] | sets[two]) > limit for one, two in zip(first, second, strict=True)]
    compared = near_duplicates.Resemblances(tokens, offsets, max_resemblance=limit)
    assert any(expected)
    assert not all(expected)
    for some in (slice(0, 70), slice(None)):
        assert compared.exceed(first[some], second[some]).tolist() == expected[some]
    assert compared.exceed(first[:0], second[:0]).tolist() == []
