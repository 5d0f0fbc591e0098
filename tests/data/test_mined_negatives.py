"""A run's mined negatives: refused where they do not fit, and the same again after a kill."""

import json
import os
import shutil
import threading
import warnings

import numpy as np
import pytest
from toy_batches import pair_batches

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations, mined_negatives
from de_jax.data.negatives.generations import rows_of_pairs
from de_jax.data.negatives.mined_negatives import MinedNegatives, Switch
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.stores import corpus
from de_jax.files import outputs, reading
from de_jax.types import InputError

TEXTS = {"queries": "hash of queries", "docs": "hash of docs"}
PAIRS = np.array([[0, 0], [1, 1], [2, 2], [2, 3]], np.int32)


@pytest.fixture(scope="module")
def stores(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("stores")
    texts = {kind: [(f"{kind}{i}", "the quick fox " * (i + 1)) for i in range(8)] for kind in "qd"}
    return tuple(corpus.build_token_store(texts[kind], tokenizer, folder / kind, progress=False) for kind in "qd")


@pytest.mark.parametrize("name", ["{x}", "{run_dir.__class__}", "{}", "{"])
def test_braces_in_a_folder_of_negatives_are_its_name(stores, name):
    texts = TrainingPairs("set", *stores, PAIRS, TEXTS)
    followed = mined_negatives.follow(f"{{run_dir}}/{name}", "runs/a", texts, num_drawn={})
    assert str(followed.negatives_dir) == f"runs/a/{name}"


def mined(shift=0, pairs=PAIRS):
    return [
        Mined(f"q{query}", f"d{doc}", [f"d{(doc + n + shift) % 8}" for n in range(1, 4 - doc % 2)], [f"q{(query + 1 + shift) % 8}"])
        for query, doc in pairs.tolist()
    ]


def texts_of(stores, hashes=None):
    return TrainingPairs("toy", *stores, PAIRS, hashes or {})


def followed(folder, stores, known=(), **options):
    drawn = {"neg_docs": 2, "neg_queries": 1}
    run = MinedNegatives(folder / "negatives", folder / "run" / "switches.jsonl", texts_of(stores), num_drawn=drawn, **options)
    run.begin(0, known)
    return run


def test_a_run_passes_over_what_is_half_copied_or_does_not_fit_and_says_so_once(tmp_path, stores):
    generations.write_lines(tmp_path / "negatives", 1, mined(), {})
    run = followed(tmp_path, stores)
    assert run.newer() is None
    generations.write_lines(tmp_path / "negatives", 2, mined(shift=2), {})
    generations.write_lines(tmp_path / "negatives", 3, [Mined("q0", "d0", ["d99"], [])], {})
    generations.write_lines(tmp_path / "negatives", 4, mined(), {})
    part = tmp_path / "negatives" / "000004" / "neg_docs.npy"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=r"generation \d of the negatives is skipped: .*(neg_docs.npy|d99)") as warned:
        assert run.newer() == 2
    assert len(warned) == 2
    assert run.newer() == 2


def test_a_generation_that_was_still_being_copied_is_taken_once_it_is_whole(tmp_path, stores):
    generations.write_lines(tmp_path / "negatives", 1, mined(), {})
    run = followed(tmp_path, stores)
    part = generations.write_lines(tmp_path / "negatives", 2, mined(shift=2), {}).folder / "neg_docs.npy"
    whole = part.read_bytes()
    part.write_bytes(whole[:-20])
    with pytest.warns(UserWarning, match="generation 2 of the negatives is skipped"):
        assert run.newer() is None
    part.write_bytes(whole)
    assert run.newer() == 2


def test_rows_stand_with_their_pairs_and_fillers_after_short_lists(tmp_path, stores):
    generation = generations.write_lines(tmp_path, 1, mined()[::-1], {})
    rows = rows_of_pairs(generation, texts_of(stores))
    np.testing.assert_array_equal(rows["neg_docs"], [[1, 2, 3], [2, 3, -1], [-1, 4, 5], [4, 5, -1]])  # q2 has d3
    np.testing.assert_array_equal(rows["neg_queries"], [[1], [2], [3], [3]])


def test_pairs_that_were_not_mined_get_fillers_and_other_pairs_are_left_out(tmp_path, stores):
    generation = generations.write_lines(tmp_path, 1, mined(pairs=np.array([[1, 1], [7, 7]])), {})
    rows = rows_of_pairs(generation, texts_of(stores))
    np.testing.assert_array_equal(rows["neg_docs"][:, 0], [-1, 2, -1, -1])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (Mined("q0", "d0", ["d1", "d99"], []), "the negative 'd99' is in none of the texts; mine again"),
        (Mined("q0", "d7", ["d1"], []), "was mined for none of the training pairs"),
    ],
)
def test_a_generation_of_other_data_is_refused(tmp_path, stores, line, sentence):
    generation = generations.write_lines(tmp_path, 1, [line], {})
    with pytest.raises(InputError, match=sentence):
        rows_of_pairs(generation, texts_of(stores))


def test_a_corpus_that_changed_is_refused_with_the_reason(tmp_path, stores):
    generation = generations.write_lines(tmp_path, 1, mined(), {**TEXTS, "docs": "of another corpus"})
    with pytest.raises(InputError, match="000001 was mined from other docs than the training data has; mine again"):
        rows_of_pairs(generation, texts_of(stores, TEXTS))


def test_a_run_begins_with_the_newest_generation_and_keeps_it_when_it_continues(tmp_path, stores):
    for number in (1, 2):
        generations.write_lines(tmp_path / "negatives", number, mined(shift=number), {})
    first = followed(tmp_path, stores)
    assert first.switches == [Switch(0, 2)]
    generations.write_lines(tmp_path / "negatives", 3, mined(shift=3), {})
    again = followed(tmp_path, stores)
    assert again.switches == [Switch(0, 2)]
    np.testing.assert_array_equal(again.at(50)["neg_docs"].rows, first.at(0)["neg_docs"].rows)


def test_a_switch_is_on_the_disk_before_it_takes_effect_and_is_replayed(tmp_path, stores):
    for number in (1, 2):
        generations.write_lines(tmp_path / "negatives", number, mined(shift=number), {})
    (tmp_path / "run").mkdir()
    outputs.append_text(tmp_path / "run" / "switches.jsonl", json.dumps({"step": 0, "generation": 1}) + "\n")
    run = followed(tmp_path, stores)
    before = pair_batches(*stores, PAIRS, batch_size=2, negatives=run.at)
    run.record(Switch(3, 2))
    stream = [next(before(step)) for step in range(6)]
    replayed = followed(tmp_path, stores)
    again = pair_batches(*stores, PAIRS, batch_size=2, negatives=replayed.at)(0)
    for expected in stream:
        found = next(again)
        np.testing.assert_array_equal(found.neg_doc_ids, expected.neg_doc_ids)
        np.testing.assert_array_equal(found.neg_query_ids, expected.neg_query_ids)
    assert [replayed.generation_at(step) for step in range(5)] == [1, 1, 1, 2, 2]


def test_a_look_that_waits_for_nothing_finds_a_generation_once_it_is_read(tmp_path, stores, monkeypatch):
    generations.write_lines(tmp_path / "negatives", 1, mined(), {})
    run, is_free, read = followed(tmp_path, stores), threading.Event(), generations.open_generation
    monkeypatch.setattr(generations, "open_generation", lambda *args: is_free.wait(60) and read(*args))
    generations.write_lines(tmp_path / "negatives", 2, mined(shift=2), {})
    assert [run.newer(within=0.0) for _ in range(3)] == [None] * 3
    (folder := tmp_path / "negatives" / "000003").mkdir()
    (folder / "manifest.json").write_text("garbage")
    assert not run.accepts(2, within=0.0)
    is_free.set()
    with pytest.warns(UserWarning, match="generation 3 of the negatives is skipped") as warned:
        assert (run.newer(within=60.0), run.newer(within=0.0)) == (2, 2)
    assert len(warned) == 1


def test_a_generation_that_is_whole_only_after_its_reading_began_is_read_again(tmp_path, stores, monkeypatch):
    generations.write_lines(tmp_path / "negatives", 1, mined(), {})
    run, read = followed(tmp_path, stores), generations.open_generation
    is_read, is_free = threading.Event(), threading.Event()
    part = generations.write_lines(tmp_path / "negatives", 2, mined(shift=2), {}).folder / "neg_docs.npy"
    whole = part.read_bytes()
    part.write_bytes(whole[:-4])

    def read_late(*args):
        try:
            return read(*args)
        finally:
            is_read.set()
            is_free.wait(60)

    monkeypatch.setattr(generations, "open_generation", read_late)
    assert run.newer(within=0.0) is None
    assert is_read.wait(60)
    part.write_bytes(whole)
    is_free.set()
    with pytest.warns(UserWarning, match="generation 2 of the negatives is skipped"):
        assert run.newer() is None  # as it was when its reading began
    assert run.newer() == 2


def test_a_pair_that_was_mined_twice_has_its_last_list_and_one_that_is_trained_on_twice_has_it_twice(tmp_path, stores):
    lines = [Mined("q1", "d1", ["d5", "d6"], []), Mined("q1", "d1", ["d7"], []), Mined("q9", "d1", ["d3"], [])]
    generation = generations.write_lines(tmp_path, 1, lines, {})
    rows = rows_of_pairs(generation, texts_of(stores)._replace(pairs=np.array([[1, 1], [2, 2], [1, 1]], np.int32)))
    np.testing.assert_array_equal(rows["neg_docs"], [[7], [-1], [7]])


def test_the_other_processes_read_what_the_first_wrote(tmp_path, stores):
    generations.write_lines(tmp_path / "negatives", 1, mined(), {})
    followed(tmp_path, stores)
    assert followed(tmp_path, stores, is_first=False).switches == [Switch(0, 1)]


def test_no_generation_at_all_is_refused_before_anything_is_written(tmp_path, stores):
    with pytest.raises(InputError, match="negatives holds no generation of negatives; make one with de-jax mine pairs"):
        followed(tmp_path, stores)
    assert not (tmp_path / "run").exists()


def test_a_damaged_file_of_switches_is_named(tmp_path, stores):
    generations.write_lines(tmp_path / "negatives", 1, mined(), {})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "switches.jsonl").write_text('{"step": 0, "generation": 1}\n{"step": 0, "generation": 2}\n')
    with pytest.raises(InputError, match=r"switches.jsonl, line 2: step is 0, expected a step beyond 0"):
        followed(tmp_path, stores)


def test_a_lost_file_of_switches_is_written_again_by_the_checkpoint_and_another_runs_is_refused(tmp_path, stores):
    for number in (1, 2):
        generations.write_lines(tmp_path / "negatives", number, mined(shift=number), {})
    known = [Switch(0, 1), Switch(3, 2)]
    assert followed(tmp_path, stores, known).switches == known
    path = tmp_path / "run" / "switches.jsonl"
    assert mined_negatives.read_switches(path) == known
    path.write_text('{"step": 0, "generation": 2}\n')
    with pytest.raises(InputError, match=r"switches.jsonl does not begin with the 2 switches that the checkpoint of step 0"):
        followed(tmp_path, stores, known)


@pytest.mark.parametrize("kept", [9, 28, 29, 33, 56])  # a line has 29 bytes
@pytest.mark.parametrize("num_known", [1, 2])
def test_a_line_of_switches_that_was_cut_off_blocks_nothing(tmp_path, stores, kept, num_known):
    for number in (1, 2):
        generations.write_lines(tmp_path / "negatives", number, mined(shift=number), {})
    switches, path = [Switch(0, 1), Switch(3, 2)], tmp_path / "run" / "switches.jsonl"
    followed(tmp_path, stores, switches)
    path.write_bytes(path.read_bytes()[:kept])
    run = followed(tmp_path, stores, switches[:num_known])
    assert run.switches == switches[:num_known]
    run.record(Switch(9, 2))
    assert mined_negatives.read_switches(path) == run.switches


def test_times_of_files_decide_nothing(tmp_path, stores):
    for number in (1, 2, 3):
        folder = generations.write_lines(tmp_path / "negatives", number, mined(shift=number), {}).folder
        for path in (folder, *folder.iterdir()):
            os.utime(path, (10**9 - number, 10**9 - number))  # the miner's clock runs backwards, years behind
    run = followed(tmp_path, stores)
    assert run.switches == [Switch(0, 3)]
    generations.write_lines(tmp_path / "negatives", 4, mined(), {})
    assert run.newer() == 4


def test_an_empty_file_of_switches_is_that_of_a_run_which_has_not_begun(tmp_path, stores):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "switches.jsonl").touch()  # killed between its making and its first line
    with pytest.raises(InputError, match="holds no generation of negatives"):
        followed(tmp_path, stores)
    generations.write_lines(tmp_path / "negatives", 1, mined(), {})
    assert followed(tmp_path, stores).switches == [Switch(0, 1)]


def test_what_was_accepted_stays_in_force_when_its_folder_is_damaged_or_removed(tmp_path, stores):
    """Two generations arrive within eight updates, and all folders go before the first of them gives a batch."""
    generations.write_lines(tmp_path / "negatives", 1, mined(), {"statistics": {"overlap_bm25": 0.5}})
    run = followed(tmp_path, stores)
    for number, step in ((2, 8), (3, 9)):
        generations.write_lines(tmp_path / "negatives", number, mined(shift=number), {"checkpoint_step": number})
        assert run.newer() == number
        run.record(Switch(step, number))
    expected = {step: rows_of_pairs(generations.open_generation(tmp_path / "negatives", number), texts_of(stores))["neg_docs"]
                for step, number in ((7, 1), (8, 2), (9, 3))}  # fmt: skip
    (tmp_path / "negatives" / "000003" / "neg_docs.npy").write_text("")
    shutil.rmtree(tmp_path / "negatives" / "000001")
    shutil.rmtree(tmp_path / "negatives" / "000002")
    for step, rows in expected.items():
        np.testing.assert_array_equal(run.at(step)["neg_docs"].rows, rows)
    assert [run.manifest_at(step).get("checkpoint_step") for step in (7, 8, 9)] == [None, 2, 3]
    assert run.newer() is None


def test_a_run_that_continues_holds_what_later_switches_name_from_its_beginning(tmp_path, stores):
    for number in (1, 2, 3):
        generations.write_lines(tmp_path / "negatives", number, mined(shift=number), {})
    known = [Switch(0, 1), Switch(8, 2), Switch(16, 3)]
    whole, run = followed(tmp_path, stores, known), followed(tmp_path, stores, known)
    expected = [whole.at(step)["neg_docs"].rows for step in (0, 8, 16)]
    shutil.rmtree(tmp_path / "negatives")
    for step, rows in zip((0, 8, 16), expected, strict=True):
        np.testing.assert_array_equal(run.at(step)["neg_docs"].rows, rows)
    with pytest.raises(InputError, match="000001 does not exist"):
        followed(tmp_path, stores, known)


def test_generations_that_are_used_up_leave_the_memory(tmp_path, stores):
    for number in range(1, 14):
        generations.write_lines(tmp_path / "negatives", number, mined(shift=number), {})
    run = followed(tmp_path, stores, [Switch(4 * number - 4, number) for number in range(1, 14)])
    assert len(run._held) == 1 + mined_negatives.SWITCHES_AHEAD
    for step in range(48):
        run.at(step)
    assert sorted(run._held) == [11, 12, 13]


DAMAGES = {
    "no manifest's text": lambda folder: (folder / "manifest.json").write_text("garbage"),
    "another format": lambda folder: (folder / "manifest.json").write_text("[1]"),
    "a truncated array": lambda folder: (folder / "neg_docs.npy").write_bytes((folder / "neg_docs.npy").read_bytes()[:-4]),
    "no array": lambda folder: (folder / "neg_docs.npy").unlink(),
    "wrong statistics": lambda folder: rewrite(folder, statistics={"overlap_bm25": "much"}),
    "a wrong step": lambda folder: rewrite(folder, checkpoint_step="eight"),
    "an array of floats": lambda folder: rewrite(folder, neg_docs=np.zeros((4, 3), np.float32)),
    "rows of no text": lambda folder: rewrite(folder, neg_docs=np.full((4, 3), 8, np.int32)),
}


def rewrite(folder, neg_docs=None, **facts):
    """A generation of these negatives and facts whose checksums are right."""
    manifest = outputs.read_json(folder / "manifest.json")
    part = folder / "neg_docs.npy"
    if neg_docs is not None:
        np.save(part, neg_docs)
    parts = manifest["parts"] | {part.name: reading.sha256_of(part)}
    outputs.write_json(folder / "manifest.json", manifest | {"parts": parts} | facts)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_new_run_begins_with_the_newest_whole_generation_and_says_once_what_it_passes_over(tmp_path, stores, damage):
    for number in (1, 2, 3):
        generations.write_lines(tmp_path / "negatives", number, mined(shift=number), {})
    for number in (2, 3):
        damage(tmp_path / "negatives" / f"{number:06d}")
    run = MinedNegatives(tmp_path / "negatives", tmp_path / "switches.jsonl", texts_of(stores), num_drawn={"neg_docs": 2})
    with warnings.catch_warnings(record=True) as warned:
        assert not run.needs_first()
        run.check()
        run.begin()
        assert (run.newer(), run.newest().rows["neg_docs"].shape) == (None, (4, 3))
        assert set(run.manifests()) == {1}
    assert run.switches == [Switch(0, 1)]
    told = [str(warning.message).partition(":")[0] for warning in warned]
    assert told == [f"generation {number} of the negatives is skipped" for number in (3, 2)]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_run_without_a_whole_generation_needs_one_and_says_how_the_newest_is_damaged(tmp_path, stores, damage):
    damage(generations.write_lines(tmp_path / "negatives", 1, mined(), {}).folder)
    run = MinedNegatives(tmp_path / "negatives", None, texts_of(stores), num_drawn={"neg_docs": 2})
    with pytest.warns(UserWarning, match="is skipped"):
        assert run.needs_first()
    assert not run.needs_first([Switch(0, 1)])  # its checkpoint was trained with that one
    with pytest.raises(InputError, match="000001"):
        run.begin()


def test_a_new_run_refuses_a_whole_generation_of_other_texts_rather_than_an_older_one(tmp_path, stores):
    generations.write_lines(tmp_path / "negatives", 1, mined(), TEXTS)
    generations.write_lines(tmp_path / "negatives", 2, mined(), {**TEXTS, "docs": "of another corpus"})
    run = MinedNegatives(tmp_path / "negatives", None, texts_of(stores, TEXTS), num_drawn={"neg_docs": 2})
    for begin in (run.check, run.needs_first, run.begin):
        with pytest.raises(InputError, match="000002 was mined from other docs"):
            begin()


def test_a_part_of_the_right_size_is_looked_at_again_when_it_was_written_again(tmp_path, stores):
    generations.write_lines(tmp_path / "negatives", 1, mined(), {})
    run = followed(tmp_path, stores)
    part = generations.write_lines(tmp_path / "negatives", 2, mined(shift=2), {}).folder / "neg_docs.npy"
    whole = part.read_bytes()
    with warnings.catch_warnings(record=True) as warned:
        for copied in (0, 20, 140):  # by a copier that reserves the space first
            part.write_bytes(whole[:copied].ljust(len(whole), b"\0"))
            assert run.newer() is None
    assert len(warned) == 1
    part.write_bytes(whole)
    assert run.newer() == 2
