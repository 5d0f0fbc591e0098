"""A recorded result is run again: what its commands print is within the tolerance, or is said not to be."""

import contextlib
import itertools
import json
import sys
from pathlib import Path

import pytest
from recorded_results import CHANGED, TOY, write_results

from de_jax.types import InputError
from reproduction import __main__ as reproduce
from reproduction import result_check
from reproduction.result_check import check
from reproduction.result_files import entries_of, read_all
from reproduction.yaml_files import read_yaml

ROOT = Path(__file__).parents[2]
RECORDED = entries_of(read_all(ROOT / "results"))


def printed(scores):
    """What an experiment prints: a line of text, and a JSON object for each method and seed."""
    lines = [
        json.dumps({"method": method, "seed": seed, "scores": {"ndcg@10": score}})
        for method, own in scores.items()
        for seed, score in enumerate(own)
    ]
    return "\n".join(["not JSON", *lines, json.dumps({"compared": {}}, indent=1)])


def toy(root, scores, text=TOY):
    write_results(root, text)
    (root / "data").write_text(printed(scores))
    return root


def test_means_over_seeds_are_compared(tmp_path):
    report = check("toy", toy(tmp_path, {"a": [0.49, 0.50, 0.54], "b": [0.3, 0.3, 0.3]}))
    assert [score["got"] for score in report["scores"]] == [pytest.approx(0.51), pytest.approx(0.3)]
    assert [score["within"] for score in report["scores"]] == [True, False]
    assert [score["score"] for score in report["scores"]] == ["a, nDCG@10", "b, nDCG@10"]
    assert not report["within"]


def test_the_command_ends_with_exit_code_1_where_a_score_is_not_within(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(toy(tmp_path, {"a": [0.5], "b": [0.4]}))
    reproduce.main(["--check", "toy"])
    assert json.loads(capsys.readouterr().out)["within"]
    toy(tmp_path, {"a": [0.5], "b": [0.3]})
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(["--check", "toy"])
    assert stopped.value.code == 1
    out, err = capsys.readouterr()
    assert not json.loads(out)["within"]
    assert err.splitlines()[-1].split()[-1] == "False"


def test_a_column_has_the_same_tolerances_whether_one_place_or_two_hold_its_scores(tmp_path):
    divided = TOY.replace(
        "lines: {a: {method: a}, b: {method: b}}",
        "lines: {a: {method: a}}\n          - columns: {nDCG@10: [scores, ndcg@10]}\n            lines: {b: {method: b}}",
    )
    assert divided != TOY
    scores = {"a": [0.5], "b": [0.4]}
    in_one, in_two = (check("toy", toy(tmp_path, scores, text)) for text in (TOY, divided))
    assert in_one == in_two
    assert in_one["scores"][0]["tolerance"] < 0.05


def test_a_stated_tolerance_counts_instead(tmp_path):
    stated = TOY.replace("lines: {a:", "tolerance: 0.2\n            because: it rolls\n            lines: {a:")
    report = check("toy", toy(tmp_path, {"a": [0.49, 0.50, 0.54], "b": [0.3, 0.3, 0.3]}, stated))
    assert [score["tolerance"] for score in report["scores"]] == [0.2, 0.2]
    assert report["within"]


@pytest.mark.parametrize(
    ("name", "written", "changed", "sentence"),
    [
        ("toys", "", "", "no entry of .*; take one of toy"),
        ("base", "", "", "the entry base has no scores"),
        ("toy", "needs: [data]", "needs: [weights]", "needs weights in"),
        ("toy", "test -e model", "test -e no_model", "a command of 'A toy' ended with exit code 1"),
        ("toy", "b: {method: b}", "b: {method: c}", "printed no score b, nDCG@10"),
        ("toy", "[scores, ndcg@10]", "[scores, mrr]", "printed no score a, nDCG@10"),
    ],
)
def test_what_stands_in_the_way_is_a_sentence(tmp_path, name, written, changed, sentence):
    assert written in TOY
    with pytest.raises(InputError, match=sentence):
        check(name, toy(tmp_path, {"a": [0.5], "b": [0.4]}, TOY.replace(written, changed) if written else TOY))


@pytest.mark.parametrize(
    ("difference", "p", "within"),
    [(-0.002, 0.04, True), (-0.1, 0.05, False), (0.1, 0.001, False)],
)
def test_a_significant_change_has_to_come_out_again_with_its_sign(tmp_path, monkeypatch, capsys, difference, p, within):
    root = toy(tmp_path, {"a": [0.5], "b": [0.4]}, CHANGED)
    systems = [
        {"b": {"difference": difference, "p_permutation": 0.001, "holm_permutation": p}},
        {"b": {"difference": 0.5, "holm_permutation": 0.01}},
    ]
    with (root / "data").open("a") as file:
        file.write("\n" + json.dumps({"design": "toy.yaml", "compared": [{"systems": one} for one in systems]}))
    report = check("toy", root)
    assert report["changes"] == [
        {"change": "b, nDCG@10", "expected": -0.1, "expected_p": 0.02, "got": difference, "got_p": p, "within": within},
        {"change": "b, MRR", "expected": 0.03, "expected_p": 0.001, "got": 0.5, "got_p": 0.01, "within": True},
    ]
    assert report["within"] == within
    monkeypatch.chdir(root)
    with contextlib.nullcontext() if within else pytest.raises(SystemExit):
        reproduce.main(["--check", "toy"])
    assert "expected_p" in capsys.readouterr().err


def test_a_change_that_is_not_printed_is_a_sentence(tmp_path):
    with pytest.raises(InputError, match="printed no change b, nDCG@10"):
        check("toy", toy(tmp_path, {"a": [0.5], "b": [0.4]}, CHANGED))


def test_the_results_of_an_earlier_entry_need_not_be_there(tmp_path):
    text = TOY.replace("needs: [data]", "needs: [data, model]")
    with pytest.raises(InputError, match=r"needs model in"):
        check("toy", toy(tmp_path, {"a": [0.5], "b": [0.4]}, text))
    (tmp_path / "base.yaml").write_text("results: model")
    assert check("toy", toy(tmp_path, {"a": [0.5], "b": [0.4]}, text.replace("seeds: []", "seeds: []\n    design: base.yaml")))[
        "within"
    ]


@pytest.mark.parametrize("name", [name for name, entry in RECORDED.items() if any(table.scores for table in entry.tables)])
def test_an_entry_comes_after_those_that_write_its_needs(name):
    written = set()
    for entry in (RECORDED[one] for one in (*result_check._before(name, RECORDED), name)):
        assert {need for need in entry.needs if need.startswith("runs/")} <= written
        written |= {read_yaml(ROOT / entry.design).get("results")} if entry.design else set()


def test_recorded_changes_are_the_comparisons_of_their_design():
    num_changes = 0
    for entry in RECORDED.values():
        for scores in (scores for table in entry.tables for scores in table.scores):
            for (_, of_set, _, number, _, arm), line in itertools.product(scores.changes.values(), scores.lines.values()):
                design = read_yaml(ROOT / "experiments" / line["design"])
                assert arm in design["compare"][number]["arms"]
                assert of_set.split(",")[0] in design["sets"]
                num_changes += 1
    assert num_changes > 100


def test_commands_run_by_this_python(tmp_path):
    own = str(Path(sys.executable).parent)
    text = TOY.replace("test -e model", f'test "$(dirname "$(command -v python)")" = {own}')
    assert check("toy", toy(tmp_path, {"a": [0.5], "b": [0.4]}, text))["within"]
