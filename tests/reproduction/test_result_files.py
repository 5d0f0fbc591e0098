"""Recorded results are read as they are written, and a mistake in one is a sentence with its file and entry."""

import datetime

import numpy as np
import pytest
from recorded_results import CHANGED, TOY, write_results

from de_jax.types import InputError
from reproduction.result_files import Table, entries_of, read_all, tolerances


def test_an_entry_is_read_as_it_is_written(tmp_path):
    themes = read_all(write_results(tmp_path))
    entry = entries_of(themes)["toy"]
    assert themes["toys"].title == "Toys"
    assert (entry.date, entry.seeds, entry.design) == (datetime.date(2026, 11, 23), [0, 1, 2], "")
    assert entry.tables[0].rows == [["method", "nDCG@10", "p"], ["a", ".500 ± .010", ""], ["b", "**.400** ± .010", ".02"]]
    assert entry.tables[0].cell("b", "p") == ".02"


def test_a_change_and_its_p_are_in_one_cell_or_beside_the_score(tmp_path):
    table = entries_of(read_all(write_results(tmp_path, CHANGED)))["toy"].tables[0]
    assert (table.change("b", "nDCG@10"), table.change("b", "MRR")) == ((-0.1, 0.02), (0.03, 0.001))
    two = Table([["", "SQuAD", "change", "p", "XQuAD", "change", "p"], ["a", ".2", "+.1", ".5", ".3", "-.2", "1.0000"]])
    assert (two.change("a", "SQuAD"), two.change("a", "XQuAD")) == ((0.1, 0.5), (-0.2, 1.0))
    of_mrr = Table([["", "MRR@10", "nDCG@10", "change of MRR@10", "p"], ["a", ".2", ".3", "+.1", ".5"]])
    assert of_mrr.change("a", "MRR@10") == (0.1, 0.5)
    with pytest.raises(ValueError, match="no change and its p"):
        of_mrr.change("a", "nDCG@10")


@pytest.mark.parametrize(
    ("written", "mistaken", "sentence"),
    [
        ("    verdict: It rolls.\n", "", "entries/toy/verdict is absent, expected a value"),
        ("    verdict: It rolls.", "    verdikt: It rolls.", "entries/toy/verdict is absent"),
        ("    verdict: It rolls.", "    verdict: It rolls.\n    mood: good", "entries/toy is 'mood', expected a key out of title"),
        ("commits: [abcdef0]", "commits: [1234567]", "entries/base/commits/0 is 1234567, expected a commit"),
        ("| b | **.400** ± .010 | .02 |", "| b | .400 |", "entries/toy/tables/0/rows is .*expected a row of 3 cells"),
        ("columns: {nDCG@10:", "columns: {nDCG:", "entry toy: the score a, nDCG: .* no single column 'nDCG'"),
        ("b: {method: b}", "c: {method: b}", "entry toy: the score c, nDCG@10: .* no single row 'c'"),
        (".500 ± .010", "half", "entry toy: the score a, nDCG@10: the cell 'half' is no number"),
        (".500 ± .010", ".500", "entry toy: the score a, nDCG@10 has no deviation"),
        ("seeds: [0, 1, 2]", "seeds: [0]", "entry toy: the score a, nDCG@10 has no deviation over two seeds"),
        ("lines: {a:", "tolerance: 0.1\n            lines: {a:", "the scores of nDCG@10 have a tolerance without `because`"),
        ("after: [base]", "after: [bass]", "entry toy: there is no entry 'bass'"),
        ("seeds: []", "seeds: []\n    after: [toy]", "come after one another in a circle"),
        ("entries: [toy]", "entries: [ball]", "Toy paper: there is no entry 'ball'"),
        ("rows: [a, b]", "rows: [a, c]", "the panel 'Left' of entry toy: .* no single row 'c'"),
        ("title: Toys\n", "title: Toys\ntitle: Twice\n", "'title' is there twice"),
        ("lines: {b: {d", "lines: {a: {d", "entry toy: the change a, nDCG@10: ' .p .' is no change and its p"),
        ("- changes: {MRR:", "- changes: {RR:", "entry toy: the change a, RR: .* no single column 'RR'"),
        ("- changes: {MRR: [compared, 1, systems, b]}", "- changes: {}", "the scores of a, b have neither columns nor changes"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_file_and_entry(tmp_path, written, mistaken, sentence):
    text = TOY if written in TOY else CHANGED
    assert written in text
    with pytest.raises(InputError, match=rf"toys\.yaml.*{sentence}"):
        read_all(write_results(tmp_path, text.replace(written, mistaken)))


def test_an_entry_has_a_name_of_its_own(tmp_path):
    write_results(tmp_path)
    with pytest.raises(InputError, match=r"toys_again\.yaml, entry base: another file has an entry of this name"):
        read_all(write_results(tmp_path, theme="toys_again"))


def test_a_folder_without_results_says_where_they_are(tmp_path):
    with pytest.raises(InputError, match="run this in a clone of the repository"):
        read_all(tmp_path)


@pytest.mark.parametrize(("num_cells", "num_seeds", "least", "most"), [(1, 3, 0.935, 0.965), (6, 3, 0.95, 0.99)])
def test_other_seeds_are_all_within_their_tolerances_nineteen_times_of_twenty(num_cells, num_seeds, least, most):
    old, new = np.random.default_rng(0).normal(size=(2, 2000, num_cells, num_seeds))
    within = []
    for first, second in zip(old, new, strict=True):
        cells = [f"{seeds.mean():.9f} ± {seeds.std(ddof=1):.9f}" for seeds in first]
        allowed = tolerances(cells, num_seeds, num_cells)
        within.append(np.all(np.abs(second.mean(1) - first.mean(1)) <= allowed))
    assert least <= np.mean(within) <= most


def test_a_tolerance_leaves_room_for_the_last_digit():
    assert tolerances([".80 ± .00"], 3, 1)[0] == pytest.approx(0.005 + 4.302653 * 0.005 * (2 / 3) ** 0.5)
