"""The table of expansions holds what the evaluation command says of each of its cells."""

import json

import pytest
import tiny_run

from de_jax import cli
from de_jax.types import InputError
from reproduction import verbs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("expansions")
    tiny_run.write_dataset(root / "data")
    tiny_run.write_run(root)
    lines = [json.dumps({"_id": f"d{i}", "queries": [f"{tiny_run.WORDS[i]} den", "the sea"]}) for i in range(10)]
    (root / "expansion.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.soak
def test_each_cell_is_what_the_evaluation_command_says(folder, capsys, monkeypatch):
    monkeypatch.setenv("DE_JAX_CACHE", str(folder / "cache"))
    run, shared = folder / "run", [f"--dataset_dir={folder / 'data'}"]
    expanded = [*shared, f"--expansion={folder / 'expansion.jsonl'}"]
    verbs.call(
        "compare expansions",
        ["--runs", f"a={run}", f"b={run},{run}", *expanded, "--num_generated", "1", "2", f"--out_dir={folder / 'out'}"],
    )
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert [(line["system"], line["form"]) for line in report["lines"]] == [
        *((system, form) for system in "ab" for form in ("views", "typical")),
        ("bm25", "document"),
    ]
    assert report["lines"][0]["scores"] == report["lines"][2]["scores"]
    assert report["lines"][0]["p"].keys() == {"1", "2"}, "the line to beat is beside itself"
    assert report["lines"][2]["p"]["0"] == 1.0, "the same run again"
    assert report["lines"][2]["p"].items() >= report["lines"][0]["p"].items()
    assert not report["lines"][4]["p"]
    assert len(report["lines"][2]["evaluations"]["2"]) == 2, "a folder for each seed"
    vectors = {form: [cost["num_vectors"] for cost in costs.values()] for form, costs in report["costs"].items()}
    assert vectors["views"][1] > vectors["views"][0] == vectors["typical"][0] == vectors["typical"][1]
    for line in (report["lines"][1], report["lines"][4]):
        for number, score in line["scores"].items():
            options = [*expanded, f"--num_generated={number}", "--expand_as=typical"] if int(number) else shared
            cli.call("evaluate beir", [f"--run_dir={run}", "--measures", "nDCG@10", *options])
            found = json.loads(capsys.readouterr().out)
            assert score == found["bm25" if line["system"] == "bm25" else "dense"]["ndcg@10"]
    assert "typical" in printed.err
    for picture in ("forms.png", "strategies.png"):
        assert (folder / "out" / picture).stat().st_size > 5000


def test_what_is_no_form_is_refused_before_anything_is_encoded(folder):
    with pytest.raises(InputError, match=r"^--forms is mean; it must be views, typical, typical_as_is or document"):
        verbs.call(
            "compare expansions",
            [
                "--runs",
                "a=/nowhere",
                f"--dataset_dir={folder / 'data'}",
                "--expansion=x",
                "--forms",
                "mean",
                "--num_generated",
                "1",
            ],
        )


@pytest.mark.parametrize("verb", ["compare expansions", "train daft"])
def test_reports_leave_a_folder_of_somebody_else_alone(folder, tmp_path, verb):
    (tmp_path / "report.json").write_text("precious")
    flags = {
        "compare expansions": ["--runs", "a=/nowhere", "--expansion=x", f"--dataset_dir={folder / 'data'}"],
        "train daft": ["--model=/nowhere", "--query_layers=0", f"--dataset_dir={folder / 'data'}", "--test_split=test"],
    }
    with pytest.raises(InputError, match=r"holds (report\.json|something else).*; choose a folder that is absent or empty"):
        verbs.call(verb, [*flags[verb], f"--out_dir={tmp_path}"])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]
