import json

import pytest

from de_jax import cli
from de_jax.data.text import pydocs
from de_jax.types import InputError


@pytest.fixture
def few_sources(monkeypatch):
    """Only the installed sources of one part of the standard library."""
    all_sources = pydocs._sources({})
    some = [source for source in all_sources if source[0].split(".")[0] in ("email", "json", "asyncio", "unittest", "logging")]
    monkeypatch.setattr(pydocs, "_sources", lambda distributions: some)


def test_the_command_prints_counts_and_a_second_run_prints_them_again(tmp_path, few_sources, capsys):
    arguments = [f"--out_dir={tmp_path / 'set'}", "--max_docs=120", "--num_processes=1", "--no_packages"]
    cli.call("import pydocs", arguments)
    first = json.loads(capsys.readouterr().out)
    modified = (tmp_path / "set" / "corpus.jsonl.gz").stat().st_mtime_ns
    cli.call("import pydocs", arguments)
    assert json.loads(capsys.readouterr().out) == first
    assert (tmp_path / "set" / "corpus.jsonl.gz").stat().st_mtime_ns == modified
    assert (first["docs"], first["packages"]) == (120, 0)
    assert first["train_queries"] > 120 - first["dev_queries"] - first["test_queries"] > 0


def test_impossible_numbers_are_refused(tmp_path):
    with pytest.raises(InputError, match="--max_docs is 0; it must be at least 1"):
        cli.call("import pydocs", [f"--out_dir={tmp_path}", "--max_docs=0"])
