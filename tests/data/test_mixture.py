"""Several sources of pairs in one run: whose batch comes when, with which ids, lengths, prompts and negatives."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import toy_run

from de_jax.configurables import read_recipe
from de_jax.data.batches.pair_batches import PairBatches
from de_jax.data.expansion.curriculum import Curriculum
from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources.mixture import mixed_pairs
from de_jax.data.sources.options import PairsOptions, Share
from de_jax.data.sources.pair_store import table_pairs
from de_jax.data.sources.training_set import beir_pairs, text_hashes
from de_jax.data.text import beir
from de_jax.data.text.vocabulary_training import train_sentencepiece
from de_jax.losses import masks
from de_jax.types import Embeddings, InputError

PROMPT = "river river "


def small_texts():
    rng = np.random.default_rng(1)
    docs = [(f"d{i}", "", f"{toy_run.sentence('comet', i, rng)} {toy_run.sentence('pepper', i, rng)}") for i in range(24)]
    return docs, [(f"q{i}", f"comet pepper {i}") for i in range(24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set of 80 training pairs, one of 20 with other texts under the same ids, and a vocabulary of other texts."""
    folder = tmp_path_factory.mktemp("mixture")
    toy_run.write_dataset(folder / "big")
    docs, queries = small_texts()
    qrels = {split: {f"q{i}": {f"d{i}": 1} for i in rows} for split, rows in (("train", range(20)), ("dev", range(20, 24)))}
    beir.write(folder / "small", docs, queries, qrels)
    train_sentencepiece([text for _, _, text in docs], folder / "other.model", vocab_size=60)
    return folder


@pytest.fixture(scope="module")
def source(folder):
    """A source of the mixture: a data set and its options."""

    def source(name, split="train", **options):
        given = {"tokenizer": str(folder / "big" / "spiece.model"), "cache_dir": str(folder / "cache"), "batch_size": 4}
        given |= {"max_query_length": 16, "max_doc_length": 24, "pack": False, "length_multiple": 8}
        return functools.partial(beir_pairs, str(folder / name), split=split, options=PairsOptions(**(given | options)))

    return source


@pytest.fixture(scope="module")
def sources(source):
    return {"big": source("big"), "small": source("small", max_doc_length=12, query_prompt=PROMPT)}


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def assert_same(first, second):
    for name, ours, theirs in zip(first._fields, first, second, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def texts_of(data, tokens):
    return data.query.tokenizer.decode([row[row > 0] for row in tokens])


def test_each_batch_is_the_next_of_one_source_as_that_source_makes_it_with_ids_of_its_own(sources):
    data = mixed_pairs(sources, weights={"big": 2.0, "small": 1.0})
    alone = {name: source().batches(0) for name, source in sources.items()}
    first = {"big": 0, "small": 96}  # both kinds of text: the first source has 96
    named = [data.source_of(step) for step in range(30)]
    assert abs(named.count("small") - 10) <= 1
    for name, batch in zip(named, data.batches(0), strict=False):
        own = next(alone[name])
        assert_same(batch, own._replace(query_id=own.query_id + first[name], doc_id=own.doc_id + first[name]))
    assert (data.doc_ids[3], data.doc_ids[99], data.query_ids[96]) == ("big/d3", "small/d3", "small/q0")


@pytest.mark.parametrize("mode", ["one_source", "mixed"])
def test_batches_from_any_step_equal_the_stream(sources, mode):
    stream = take(mixed_pairs(sources, mode=mode, temperature=2.0).batches(0), 40)  # several epochs of the small source
    for start in (1, 7, 24, 37):
        for ours, theirs in zip(mixed_pairs(sources, mode=mode, temperature=2.0).batches(start), stream[start:], strict=False):
            assert_same(ours, theirs)


@pytest.mark.parametrize("mode", ["one_source", "mixed"])
def test_two_hosts_share_the_batches_of_one(sources, mode):
    whole = take(mixed_pairs(sources, mode=mode).batches(0), 8)
    hosts = [take(mixed_pairs(sources, mode=mode, share=Share(host_index=index, num_hosts=2)).batches(0), 8) for index in (0, 1)]
    for batch, *shares in zip(whole, *hosts, strict=True):
        assert_same(batch, batch._replace(**{name: np.concatenate([one._asdict()[name] for one in shares]) for name in NAMES}))


NAMES = ("query", "doc", "query_id", "doc_id")


@pytest.mark.parametrize("mode", ["one_source", "mixed"])
def test_prompts_and_lengths_are_each_sources_own(sources, mode):
    data = mixed_pairs(sources, mode=mode, weights={"big": 1.0, "small": 1.0})
    longest, prompted = {"big": 0, "small": 0}, {"big": set(), "small": set()}
    for batch in take(data.batches(0), 30):
        for text, tokens, row in zip(texts_of(data, batch.query), batch.doc, batch.doc_id, strict=True):
            name = data.doc_ids[row].partition("/")[0]
            prompted[name].add(text.startswith(PROMPT))
            longest[name] = max(longest[name], int((tokens > 0).sum()))
    assert longest == {"big": 24, "small": 12}
    assert prompted == {"big": {False}, "small": {True}}
    assert (data.query.prompt, data.doc.max_length) == ("", 24)  # the run's are the first source's


def test_packed_batches_hold_the_texts_of_padded_ones(source):
    padded, packed = (
        mixed_pairs(
            {"big": source("big", pack=pack), "small": source("small", max_doc_length=12, pack=pack)}, mode="mixed"
        ).batches(0)
        for pack in (False, True)
    )
    for ours, theirs in zip(take(packed, 10), take(padded, 10), strict=True):
        np.testing.assert_array_equal(ours.doc_id, theirs.doc_id)
        starts = (np.cumsum(ours.doc.lengths, axis=1) - ours.doc.lengths).reshape(-1)
        for slot, text in zip(ours.doc.slots, theirs.doc, strict=True):
            row = ours.doc.tokens[slot // ours.doc.lengths.shape[1], starts[slot] :]
            assert row[: ours.doc.lengths.reshape(-1)[slot]].tolist() == text[text > 0].tolist()


def negatives_in(batch):
    """Who is a negative of whom in the batch, [B, B]."""
    e = Embeddings(*(jnp.zeros((len(batch.doc_id), 2)),) * 2, jnp.asarray(batch.query_id), jnp.asarray(batch.doc_id))
    ids = masks.pair_ids(e._replace(positive_ids=None if batch.positive_ids is None else jnp.asarray(batch.positive_ids)))
    return np.asarray(masks.is_negative(ids, ids, mask_duplicates=True))


def test_texts_of_two_sources_under_the_same_row_do_not_mask_each_other(source):
    data = mixed_pairs({"big": source("big", batch_size=16), "small": source("small", batch_size=16)}, mode="mixed")
    collisions = 0
    for batch in take(data.batches(0), 10):
        rows = np.where(batch.doc_id < 96, batch.doc_id, batch.doc_id - 96)
        collisions += len(rows) - len(np.unique(rows))
        np.testing.assert_array_equal(negatives_in(batch), ~np.eye(16, dtype=bool))
    assert collisions > 0


def test_a_document_of_two_sources_over_one_corpus_is_one_document(source, tmp_path):
    again = {"train": {f"q{i}": {f"d{i + 1}": 1} for i in range(20)}}  # other pairs of the same texts
    beir.write(tmp_path / "again", *small_texts(), again)
    options = {"batch_size": 8, "mask_positives": True}
    both = {"small": source("small", **options), "again": source(tmp_path / "again", **options)}
    data = mixed_pairs(both, mode="mixed")
    for batch in take(data.batches(0), 5):
        query, doc = batch.query_id[:, None], batch.doc_id[None, :]
        is_judged = (doc == query) | (doc == query + 1)
        np.testing.assert_array_equal(negatives_in(batch), ~(is_judged | is_judged.T))
    assert max(batch.doc_id.max() for batch in take(data.batches(0), 5)) < 24


@pytest.mark.parametrize("mode", ["one_source", "mixed"])
def test_texts_are_told_apart_by_what_batches_hold_of_them(source, tmp_path, mode):
    docs, queries = small_texts()
    longer = [(doc_id, "", f"{text} pepper") for doc_id, _, text in docs]
    qrels = {"train": {f"q{i}": {f"d{i}": 1} for i in range(20)}}
    for name, texts in (("whole", docs), ("other", longer)):
        beir.write(tmp_path / name, texts, queries, qrels)
    read, cut = (
        mixed_pairs({name: source(tmp_path / name, **length) for name in ("whole", "other")}, mode=mode)
        for length in ({"max_doc_length": 200, "trained_doc_length": 12}, {"max_doc_length": 12})
    )
    assert (read.doc.max_length, cut.doc.max_length) == (200, 12)
    for ours, theirs in zip(take(read.batches(0), 8), take(cut.batches(0), 8), strict=True):
        assert_same(ours, theirs)
    assert max(batch.doc_id.max() for batch in take(cut.batches(0), 8)) < 24  # the other source has the same beginnings


def test_mixed_batches_hold_the_shares_and_a_source_may_be_smaller_than_a_batch(source):
    sources = {"big": source("big", batch_size=25), "small": source("small", batch_size=25)}
    with pytest.raises(InputError, match="source 'small' of the mixture: batch_size 25 is more than the 20 training pairs"):
        mixed_pairs(sources)
    with pytest.raises(InputError, match=r"source 'small' has the share 0.9 of batches of 25 pairs, .* the 20 .* at most 0.8"):
        mixed_pairs(sources, mode="mixed", weights={"big": 1.0, "small": 9.0})
    data = mixed_pairs(sources, mode="mixed", weights={"big": 9.0, "small": 1.0})
    ids = np.concatenate([batch.query_id for batch in take(data.batches(0), 8)])  # two epochs of 100 pairs
    assert np.count_nonzero(ids >= 96) == 20
    assert len(np.unique(ids[ids >= 96])) == 20  # each pair of the small source once
    assert data.source_of(3) == ""


def test_a_source_that_no_batch_comes_from_is_named(source):
    sources = {"big": source("big"), "small": source("small")}
    with pytest.warns(UserWarning, match="source 'small' of the mixture has so small a share that it gives none of the run's 500"):
        mixed_pairs(sources, weights={"big": 1.0, "small": 1e-5}, share=Share(num_steps=500))


@pytest.fixture
def mined(folder, source, tmp_path):
    """Sources of which the small one has mined negatives: of each document, the five behind it."""
    mined = [Mined(f"q{i}", f"d{i}", [f"d{(i + n) % 24}" for n in range(1, 6)], []) for i in range(20)]
    generations.write_lines(tmp_path / "negatives" / "small", 1, mined, text_hashes(folder / "small"))
    options = {"negatives_dir": "{run_dir}/negatives/{source}", "num_neg_docs": 3}
    return {"big": source("big"), "small": source("small", max_doc_length=12, **options)}


@pytest.mark.parametrize("mode", ["one_source", "mixed"])
def test_mined_negatives_are_a_sources_own(mined, tmp_path, mode):
    data = mixed_pairs(mined, mode=mode, share=Share(run_dir=str(tmp_path)))
    assert list(data.all_mined) == ["small"]
    data.all_mined["small"].begin()
    assert (tmp_path / "switches_small.jsonl").exists()
    seen = 0
    for step, batch in enumerate(take(data.batches(0), 30)):
        if mode == "one_source" and data.source_of(step) == "big":
            assert batch.neg_docs is None
            continue
        for doc_id, neg_ids, tokens in zip(batch.doc_id, batch.neg_doc_ids, batch.neg_docs, strict=True):
            if doc_id < 96:
                assert (neg_ids == -1).all()
                assert not tokens.any()
            else:
                seen += 1
                assert len(set(neg_ids)) == 3
                assert set((neg_ids - doc_id) % 24) <= {1, 2, 3, 4, 5}
                store = data.sources["small"].texts.doc_store
                np.testing.assert_array_equal(tokens, store.pad(neg_ids - 96, 12, tokens.shape[1]))
    assert seen >= 20


def test_negatives_follow_the_steps_of_the_run_and_not_of_their_source(source):
    """A newer generation comes into force at a step of the run."""
    asked = []
    data = source("small")()
    own = data.batches

    class Watched(PairBatches):
        def __call__(self, start, steps=None):
            for number, step in enumerate(steps, start):
                asked.append((number, step))
                yield next(own(number))

    watched = lambda share: data._replace(batches=Watched(own.pairs, own.options))  # noqa: E731
    mixture = mixed_pairs({"big": source("big"), "small": watched})
    take(mixture.batches(10), 20)
    steps = [step for step in range(30) if mixture.source_of(step) == "small"]
    assert asked == [(number, step) for number, step in enumerate(steps) if step >= 10]


def test_gin_binds_the_settings_of_each_source_in_its_scope(folder):
    settings = {
        "Recipe.data": "@mixed_pairs",
        "mixed_pairs.sources": '{"a": @a/beir_pairs, "b": @b/stored_pairs}',
        "mixed_pairs.weights": '{"a": 3, "b": 1}',
        "a/beir_pairs.dataset_dir": "data/a",
        "a/PairsOptions.query_prompt": '"ask: "',
        "b/PairsOptions.max_doc_length": 64,
        "PairsOptions.batch_size": 32,
    }
    typed = [f"{name}={value}" for name, value in settings.items() if "sources" not in name]
    file = folder / "mixture.gin"
    file.write_text(
        f"include 'recipes/sde.gin'\ninclude 'models/t5_1_1_tiny.gin'\nmixed_pairs.sources = {settings['mixed_pairs.sources']}\n"
    )
    recipe = read_recipe([str(file)], typed)
    a, b = (recipe.data.keywords["sources"][name].keywords for name in "ab")
    assert (a["dataset_dir"], a["options"].query_prompt, a["options"].max_doc_length) == ("data/a", "ask: ", 256)
    assert (b["options"].query_prompt, b["options"].max_doc_length, b["options"].batch_size) == (None, 64, 32)
    assert recipe.data.keywords["weights"] == {"a": 3, "b": 1}
    assert recipe.options.max_doc_length == 256


REFUSED = [
    ({"sources": {}}, {}, r"mixed_pairs.sources is not set; give sources by name"),
    ({"weights": {"big": 1.0}}, {}, "weights are for big, but the sources are big, small; give each source one weight"),
    ({"weights": {"big": 1.0, "small": 1.0, "tiny": 1.0}}, {}, "weights are for big, small, tiny, but the sources are big, small"),
    ({"weights": {"big": 1, "small": -1}}, {}, r"mixed_pairs\.weights\[\'small\'\] is -1; it must be more than 0"),
    ({"weights": {"big": 0, "small": 0}}, {}, r"mixed_pairs\.weights\[\'big\'\] is 0; it must be more than 0"),
    ({"weights": {"big": 1.0, "small": 1.0}, "temperature": 2.0}, {}, "both decide the sources' shares; set one"),
    ({"temperature": 0.0}, {}, "mixed_pairs.temperature is 0.0; it must be more than 0"),
    ({"mode": "mix"}, {}, r"did you mean 'mixed'\?"),
    ({"sources": {"a/b": len}}, {}, "'a/b' cannot name a source"),
    ({"mode": "mixed"}, {"seed": 3}, "share their batches, but have seed None and 3; give them one PairsOptions.seed"),
    ({"sources": {"a": len}}, {}, r"mixed_pairs.sources\['a'\] is len, which cannot be called with share alone"),
    ({}, {"batch_size": 8}, "have batches of 4 and 8 pairs; give them one PairsOptions.batch_size"),
    ({}, {"tokenizer": "other.model"}, "have different query vocabularies; give them one PairsOptions.tokenizer"),
    ({}, {"dev_split": "nowhere"}, "source 'small' of the mixture: .* has no split 'nowhere'"),
    (
        {"mode": "mixed"},
        {"pack": True},
        "share their batches, but have pack False and True; give them one PairsOptions.pack, or set",
    ),
    ({"mode": "mixed"}, {"max_passages": 2}, "source 'small' of the mixture has max_passages, which is for batches of one source"),
]


@pytest.mark.parametrize(("settings", "options", "sentence"), REFUSED, ids=[sentence for *_, sentence in REFUSED])
def test_what_cannot_be_mixed_is_refused_in_a_sentence(folder, source, settings, options, sentence):
    if "tokenizer" in options:
        options = {"tokenizer": str(folder / options["tokenizer"])}
    given = {"sources": {"big": source("big"), "small": source("small", **options)}}
    with pytest.raises(InputError, match=sentence):
        mixed_pairs(**(given | settings))


def test_sources_that_share_what_they_may_not_are_refused(source, tmp_path):
    both = {"negatives_dir": "{run_dir}/negatives"}
    with pytest.raises(
        InputError, match=r"have one folder of negatives, .*/negatives; give each its own, as \{run_dir\}/negatives/\{s"
    ):
        mixed_pairs({"a": source("big", **both), "b": source("small", **both)}, share=Share(run_dir=str(tmp_path)))
    same = {"a": source("big"), "b": source("big", "dev", max_doc_length=12)}
    with pytest.raises(InputError, match="read the same texts with max_doc_length 12 and 24; give them one"):
        mixed_pairs(same, mode="mixed")
    with pytest.raises(InputError, match=r"source 'b' of the mixture: .* is not set; add b/beir_pairs.dataset_dir=<path>"):
        mixed_pairs({"a": source("big"), "b": beir_pairs})
    with pytest.raises(InputError, match="is not a source of pairs; use one like beir_pairs, and not a mixture"):
        mixed_pairs({"a": functools.partial(mixed_pairs, {"b": source("big")})})


@pytest.mark.parametrize(("option", "value"), [("curriculum", Curriculum()), ("guide_dir", "guide")])
def test_curricula_and_guides_are_for_batches_of_one_source(source, option, value):
    opened = source("small")()
    options = PairsOptions(**{option: value}, batch_size=4)
    with_option = lambda share: opened._replace(batches=PairBatches(opened.texts, options))  # noqa: E731
    with pytest.raises(InputError, match=f"source 'small' of the mixture has {option}, which is for batches of one source"):
        mixed_pairs({"big": source("big"), "small": with_option}, mode="mixed")


@pytest.mark.parametrize("mode", ["one_source", "mixed"])
def test_a_table_is_a_source_beside_a_data_set(source, mode):
    rows = [{"query": f"comet {i}", "doc": f"pepper {i}"} for i in range(12)]
    table = functools.partial(table_pairs, rows, dev_fraction=0.4, options=source("small").keywords["options"])
    data = mixed_pairs({"table": table, "small": source("small")}, mode=mode)
    names = [{data.query_ids[row].split("/")[0] for row in batch.query_id} for batch in take(data.batches(0), 12)]
    assert set.union(*names) == {"table", "small"}
    assert (max(map(len, names)) == 1) == (mode == "one_source")
    assert list(data.dev_sets) == ["table"]
