"""What `de-jax "doctor"` says of this installation, and of ones that are broken in known ways."""

import json
from importlib import metadata

import jax
import pytest

from de_jax import cli
from de_jax.tools import doctor
from de_jax.types import InputError


def said(capsys, *argv):
    cli.call("doctor", ["--json", *argv])
    return json.loads(capsys.readouterr().out)


def test_a_whole_installation_has_no_problem_and_is_described(capsys, monkeypatch):
    monkeypatch.setenv("DE_JAX_CACHE", "/tmp")
    monkeypatch.setenv("HF_TOKEN", "secret")
    report = said(capsys)
    assert report["problems"] == []
    assert f"jax {jax.__version__}, " in report["found"]["Libraries"][1]
    assert report["found"]["Devices"] == [f"{jax.device_count()} x cpu (cpu)"]
    assert "tables: installed" in report["found"]["Extras"]
    assert "DE_JAX_CACHE=/tmp" in report["found"]["Environment"]
    assert "secret" not in json.dumps(report)


def test_problems_are_listed_with_what_mends_them(capsys, monkeypatch, tmp_path):
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")} | {
        "jaxlib": "0.9.0", "optax": "0.1.0", "gin-config": None, "faiss-cpu": "1", "faiss-gpu": "1",
    }  # fmt: skip
    whole = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions[name] if name in versions else whole(name))
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(doctor, "LEAST_FREE", 1 << 60)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(InputError, match=r"^problems found: [89], listed above"):
        cli.call("doctor", [])
    shown = capsys.readouterr()
    for sentence in (
        "problem: gin-config is not installed; pip install 'gin-config>=0.5.0'.",
        "problem: optax is 0.1.0; de_jax needs <0.3,>=0.2.6: pip install 'optax<0.3,>=0.2.6'.",
        f"problem: jax is {jax.__version__} and jaxlib 0.9.0; install both of one version: pip install 'jax=={jax.__version__}'.",
        "problem: faiss-cpu and faiss-gpu overwrite each other's files",
        "problem: there is an NVIDIA GPU, and JAX uses the CPU; pip install 'de-jax-retrieval[gpu]'.",
        "free; a checkpoint of T5 base takes",
    ):
        assert sentence in shown.err
    assert "gpu: pip install 'de-jax-retrieval[gpu]' adds jax-cuda12-plugin" in " ".join(shown.out.split())
    assert "No problem found" not in shown.out
