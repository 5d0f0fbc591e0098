"""A run's mined negatives: refused where they do not fit, and the same again after a kill."""

import json
import os

import numpy as np
import pytest

from de_jax.data import batches, corpus, files, generations, negatives
from de_jax.data.generations import Mined
from de_jax.data.negatives import MinedNegatives, Switch, TrainingTexts
from de_jax.types import InputError

TEXTS = {"queries": "hash of queries", "docs": "hash of docs"}
PAIRS = np.array([[0, 0], [1, 1], [2, 2], [2, 3]], np.int32)


@pytest.fixture(scope="module")
def stores(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("stores")
    texts = {kind: [(f"{kind}{i}", "the quick fox " * (i + 1)) for i in range(8)] for kind in "qd"}
    return tuple(corpus.build_token_store(texts[kind], tokenizer, folder / kind, progress=False) for kind in "qd")


def mined(shift=0, pairs=PAIRS):
    return [
        Mined(f"q{query}", f"d{doc}", [f"d{(doc + n + shift) % 8}" for n in range(1, 4 - doc % 2)], [f"q{(query + 1 + shift) % 8}"])
        for query, doc in pairs.tolist()
    ]


def texts_of(stores, hashes=None):
    return TrainingTexts("toy", *stores, PAIRS, hashes or {})


def followed(folder, stores, known=(), **options):
    drawn = {"neg_docs": 2, "neg_queries": 1}
    run = MinedNegatives(folder / "negatives", folder / "run" / "switches.jsonl", texts_of(stores), num_drawn=drawn, **options)
    run.begin(0, known)
    return run


def test_a_run_passes_over_what_is_half_copied_or_does_not_fit_and_says_so_once(tmp_path, stores):
    generations.write_generation(tmp_path / "negatives", 1, mined(), {})
    run = followed(tmp_path, stores)
    assert run.newer() is None
    generations.write_generation(tmp_path / "negatives", 2, mined(shift=2), {})
    generations.write_generation(tmp_path / "negatives", 3, [Mined("q0", "d0", ["d99"], [])], {})
    generations.write_generation(tmp_path / "negatives", 4, mined(), {})
    part = tmp_path / "negatives" / "000004" / "part-00000.jsonl"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=r"generation \d of the negatives is passed over: .*(part-00000|d99)") as warned:
        assert run.newer() == 2
    assert len(warned) == 2
    assert run.newer() == 2


def test_a_generation_that_was_still_being_copied_is_taken_once_it_is_whole(tmp_path, stores):
    generations.write_generation(tmp_path / "negatives", 1, mined(), {})
    run = followed(tmp_path, stores)
    part = generations.write_generation(tmp_path / "negatives", 2, mined(shift=2), {}).folder / "part-00000.jsonl"
    whole = part.read_bytes()
    part.write_bytes(whole[:-20])
    with pytest.warns(UserWarning, match="generation 2 of the negatives is passed over"):
        assert run.newer() is None
    part.write_bytes(whole)
    assert run.newer() == 2


def test_rows_stand_with_their_pairs_and_fillers_after_short_lists(tmp_path, stores):
    generation = generations.write_generation(tmp_path, 1, mined()[::-1], {})
    rows = negatives.rows_of_pairs(generation, texts_of(stores))
    np.testing.assert_array_equal(rows["neg_docs"], [[1, 2, 3], [2, 3, -1], [3, 4, 5], [4, 5, -1]])
    np.testing.assert_array_equal(rows["neg_queries"], [[1], [2], [3], [3]])


def test_pairs_that_were_not_mined_get_fillers_and_other_pairs_are_left_out(tmp_path, stores):
    generation = generations.write_generation(tmp_path, 1, mined(pairs=np.array([[1, 1], [7, 7]])), {})
    rows = negatives.rows_of_pairs(generation, texts_of(stores))
    np.testing.assert_array_equal(rows["neg_docs"][:, 0], [-1, 2, -1, -1])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (Mined("q0", "d0", ["d1", "d99"], []), "the negative 'd99' is in none of the texts; mine again"),
        (Mined("q0", "d7", ["d1"], []), "was mined for none of the training pairs"),
    ],
)
def test_a_generation_of_other_data_is_refused(tmp_path, stores, line, sentence):
    generation = generations.write_generation(tmp_path, 1, [line], {})
    with pytest.raises(InputError, match=sentence):
        negatives.rows_of_pairs(generation, texts_of(stores))


def test_a_corpus_that_changed_is_refused_with_the_reason(tmp_path, stores):
    generation = generations.write_generation(tmp_path, 1, mined(), {**TEXTS, "docs": "of another corpus"})
    with pytest.raises(InputError, match="000001 was mined from other docs than are trained on; mine again"):
        negatives.rows_of_pairs(generation, texts_of(stores, TEXTS))


def test_a_run_begins_with_the_newest_generation_and_keeps_it_when_it_continues(tmp_path, stores):
    for number in (1, 2):
        generations.write_generation(tmp_path / "negatives", number, mined(shift=number), {})
    first = followed(tmp_path, stores)
    assert first.switches == [Switch(0, 2)]
    generations.write_generation(tmp_path / "negatives", 3, mined(shift=3), {})
    again = followed(tmp_path, stores)
    assert again.switches == [Switch(0, 2)]
    np.testing.assert_array_equal(again.at(50)["neg_docs"].rows, first.at(0)["neg_docs"].rows)


def test_a_switch_is_on_the_disk_before_it_takes_effect_and_is_replayed(tmp_path, stores):
    for number in (1, 2):
        generations.write_generation(tmp_path / "negatives", number, mined(shift=number), {})
    (tmp_path / "run").mkdir()
    files.append_text(tmp_path / "run" / "switches.jsonl", json.dumps({"step": 0, "generation": 1}) + "\n")
    run = followed(tmp_path, stores)
    before = batches.pair_batches(*stores, PAIRS, batch_size=2, negatives=run.at)
    run.record(Switch(3, 2))
    stream = [next(before(step)) for step in range(6)]
    replayed = followed(tmp_path, stores)
    again = batches.pair_batches(*stores, PAIRS, batch_size=2, negatives=replayed.at)(0)
    for expected in stream:
        found = next(again)
        np.testing.assert_array_equal(found.neg_doc_ids, expected.neg_doc_ids)
        np.testing.assert_array_equal(found.neg_query_ids, expected.neg_query_ids)
    assert [replayed.generation_at(step) for step in range(5)] == [1, 1, 1, 2, 2]


def test_the_other_processes_read_what_the_first_wrote(tmp_path, stores):
    generations.write_generation(tmp_path / "negatives", 1, mined(), {})
    followed(tmp_path, stores)
    assert followed(tmp_path, stores, is_first=False).switches == [Switch(0, 1)]


def test_no_generation_at_all_is_refused_before_anything_is_written(tmp_path, stores):
    with pytest.raises(InputError, match="negatives holds no generation of negatives; make one with de-jax mine_negatives"):
        followed(tmp_path, stores)
    assert not (tmp_path / "run").exists()


def test_a_damaged_file_of_switches_is_named(tmp_path, stores):
    generations.write_generation(tmp_path / "negatives", 1, mined(), {})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "switches.jsonl").write_text('{"step": 0, "generation": 1}\n{"step": 0, "generation": 2}\n')
    with pytest.raises(InputError, match=r"switches.jsonl, line 2: expected a step beyond the last one"):
        followed(tmp_path, stores)


def test_a_lost_file_of_switches_is_written_again_by_the_checkpoint_and_another_runs_is_refused(tmp_path, stores):
    for number in (1, 2):
        generations.write_generation(tmp_path / "negatives", number, mined(shift=number), {})
    known = [Switch(0, 1), Switch(3, 2)]
    assert followed(tmp_path, stores, known).switches == known
    path = tmp_path / "run" / "switches.jsonl"
    assert negatives.read_switches(path) == known
    path.write_text('{"step": 0, "generation": 2}\n')
    with pytest.raises(InputError, match=r"switches.jsonl does not begin with the 2 switches that the checkpoint of step 0"):
        followed(tmp_path, stores, known)


def test_times_of_files_decide_nothing(tmp_path, stores):
    for number in (1, 2, 3):
        folder = generations.write_generation(tmp_path / "negatives", number, mined(shift=number), {}).folder
        for path in (folder, *folder.iterdir()):
            os.utime(path, (10**9 - number, 10**9 - number))  # the miner's clock runs backwards, years behind
    run = followed(tmp_path, stores)
    assert run.switches == [Switch(0, 3)]
    generations.write_generation(tmp_path / "negatives", 4, mined(), {})
    assert run.newer() == 4


def test_an_empty_file_of_switches_is_that_of_a_run_which_has_not_begun(tmp_path, stores):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "switches.jsonl").touch()  # killed between its making and its first line
    with pytest.raises(InputError, match="holds no generation of negatives"):
        followed(tmp_path, stores)
    generations.write_generation(tmp_path / "negatives", 1, mined(), {})
    assert followed(tmp_path, stores).switches == [Switch(0, 1)]
