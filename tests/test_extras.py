"""The core works without the packages of the extras; what needs one says which."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from de_jax.data.expansion import relevance
from de_jax.reports import plots
from de_jax.settings import needs
from de_jax.training.run import run_log
from de_jax.types import InputError

ROOT = Path(__file__).resolve().parents[1]


def hide(monkeypatch, *packages):
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("package", ["matplotlib", "sklearn", "threadpoolctl"])
def test_pictures_name_their_extra(monkeypatch, package, tmp_path):
    hide(monkeypatch, package)
    with pytest.raises(InputError, match=rf"drawing needs the package {package}; run pip install 'de-jax-retrieval\[reports\]'"):
        plots.require()


@pytest.mark.parametrize("before", [None, "1"])
def test_transformers_gives_no_advice_to_install_torch_and_the_environment_stays(monkeypatch, before):
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(name, before)
    with needs("transformers", "it"):
        assert os.environ[name]
    assert os.environ.get(name) == before


def test_measures_of_words_name_their_extra(monkeypatch):
    hide(monkeypatch, "nltk", "nltk.stem", "nltk.stem.porter", "rapidfuzz")
    relevance._stemmer.cache_clear()
    with pytest.raises(InputError, match=r"rouge_l needs the package rapidfuzz; run pip install 'de-jax-retrieval\[curriculum\]'"):
        relevance.rouge_l(0, "opens a file", ["opening files"])
    with pytest.raises(InputError, match=r"needs the package nltk.*; run pip install 'de-jax-retrieval\[curriculum\]'"):
        relevance._stemmer()


def test_a_training_without_tensorboard_says_so_and_logs(monkeypatch, tmp_path, capsys):
    hide(monkeypatch, "tensorboardX", "tensorboardX.event_file_writer")
    run_log.tensorboard_sink(tmp_path, 0)(1, {"loss": 1.0})
    assert "metrics.jsonl alone has the curves: TensorBoard's log needs the package tensorboardX" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_extra_in_a_message_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = subprocess.run(
        ["grep", "-rhoE", r"needs\(\"\w+\"|DISTRIBUTION\}\[\w+\]", "de_jax", "tools"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    names = {line.removeprefix('needs("').rstrip('"').rpartition("[")[2].rstrip("]") for line in found}
    assert len(names) > 8
    assert names <= set(extras)
