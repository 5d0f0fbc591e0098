"""The GPU suite: a part a file, reasons for what was not run, and nothing done twice."""

import json

import pytest

from benchmarks import gpu
from benchmarks.gpu import Part


@pytest.fixture
def suite(tmp_path, monkeypatch, capsys):
    """Runs the suite on an imagined GPU of 80 GiB; its report and files."""
    monkeypatch.setattr(gpu, "_device", lambda: {"platform": "gpu", "kind": "toy", "bytes": 80 << 30})
    parts = {"well": Part("json.tool --help"), "large": Part("json.tool --help", device_gib=90.0), "absent": Part("no_such_module")}
    monkeypatch.setattr(gpu, "PARTS", parts)

    def run(*flags):
        code = 0
        try:
            gpu.main([f"--out={tmp_path}", *flags])
        except SystemExit as error:
            code = error.code
        files = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        return code, json.loads(capsys.readouterr().out), files

    return run


def test_a_part_that_fails_or_does_not_fit_says_why_and_stops_no_other(suite, tmp_path):
    code, report, files = suite()
    assert (code, report) == (1, {"out": str(tmp_path), "done": 1, "skipped": 1, "failed": 1})
    assert files["large"]["because"] == "it needs 90 GiB of the GPU, and JAX has 80.0"
    assert "No module named no_such_module" in files["absent"]["stderr"]
    assert files["well"]["command"] == "python -m json.tool --help"


def test_finished_parts_are_not_repeated_and_others_are(suite, monkeypatch):
    seconds = suite()[2]["well"]["seconds"]
    monkeypatch.setitem(gpu.PARTS, "absent", Part("json.tool --help"))
    monkeypatch.setitem(gpu.PARTS, "well", Part("no_such_module"))
    code, report, files = suite()
    assert (code, report["done"], files["well"]["seconds"]) == (0, 2, seconds)


def test_a_part_ends_at_its_limit(suite, monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", {"endless": Part("http.server --bind 127.0.0.1 0")})
    assert suite("--limit=1")[2]["endless"]["because"] == "it took longer than 1 seconds"


def test_without_a_gpu_every_part_says_so(suite, monkeypatch):
    monkeypatch.setattr(gpu, "_device", lambda: {"platform": "cpu", "kind": "cpu", "bytes": 0})
    code, report, files = suite()
    assert (code, report["skipped"]) == (0, 3)
    assert files["well"]["because"] == "JAX sees no GPU, only cpu; see de-jax doctor"
