"""--index of search and evaluate beir, on a tiny run with random parameters."""

import json

import pytest
import tiny_run
from tiny_run import WORDS

from de_jax import arguments, cli
from de_jax.data.text import beir
from de_jax.types import InputError


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """--run_dir and --dataset_dir of 100 documents."""
    folder = tmp_path_factory.mktemp("index_choice")
    docs = [(f"d{i}", a, f"the {a} and the {b} of it") for i, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS)]
    beir.write(folder / "tiny", docs, [("q0", "red fox"), ("q1", "grey wolf den")], {"test": {"q0": {"d0": 1}, "q1": {"d26": 1}}})
    return ["--run_dir", str(tiny_run.write_run(folder)), "--dataset_dir", str(folder / "tiny")]


@pytest.fixture
def printed(flags, capsys, tmp_path, monkeypatch):
    """Runs a tool and gives the one JSON object it printed."""
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path))

    def run(tool, *argv):
        cli.call(tool, [*flags, *argv])
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("choice", [["--index", "Flat"], ["--index", "IVF4,Flat", "--nprobe", "4"]])
def test_an_index_that_sees_all_documents_changes_no_result(printed, choice):
    exact, found = (printed("search", "--query", "red fox", *argv)["results"] for argv in ([], choice))
    assert [result["id"] for result in found] == [result["id"] for result in exact]
    exact, found = (printed("evaluate beir", "--no_bm25", *argv) for argv in ([], choice))
    assert found["dense"] == exact["dense"]
    assert found["settings"]["index"] == choice[1]


@pytest.mark.parametrize("tool", ["search", "evaluate beir"])
@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (["--index", "nonsense"], "could not parse index string"),
        (["--index", "HNSW32", "--nprobe", "4"], "nprobe does not apply"),
        (["--nprobe", "4"], "the exact index takes no nprobe"),
        (["--index", "Flat", "--faiss_device", "gpu"], "FAISS sees no GPU"),
    ],
)
def test_a_choice_is_refused_before_a_model_loads(flags, monkeypatch, tool, choice, message):
    monkeypatch.setattr(arguments, "open_model", None)
    with pytest.raises(InputError, match=message):
        cli.call(tool, [*flags, *choice])
