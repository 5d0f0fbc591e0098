"""The visit to a GPU: a line a part, reasons for skipped parts, nothing done twice, and no GPU test that a CPU can pass."""

import importlib
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from often import often

from benchmarks import device_tests, gpu
from benchmarks.gpu import Part

ROOT = Path(__file__).parents[2]


@pytest.fixture
def visit(tmp_path, monkeypatch, capsys):
    """Runs the visit on an imagined GPU of 80 GiB with parts of its own; its exit code, report and lines."""
    stats = {"bytes_limit": 80 << 30}
    device = types.SimpleNamespace(memory_stats=lambda: stats, device_kind="toy")
    monkeypatch.setattr(gpu.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu.jax, "devices", lambda: [device])
    monkeypatch.setattr(gpu.measure, "environment", dict)
    small = "ceilings --size 64 --calls 1"
    parts = {"ceilings": Part(small, 60), "large": Part(small, 60, device_gib=90.0), "absent": Part("no_such_module", 60)}
    parts["long"] = Part(small, 10_000)
    monkeypatch.setattr(gpu, "PARTS", parts)

    def run(*flags):
        code = 0
        try:
            gpu.main([f"--out={tmp_path}", "--seconds=900", "--commit=abc", "--part", *(flags or parts)])
        except SystemExit as error:
            code = error.code
        lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
        return code, json.loads(capsys.readouterr().out), lines

    return run


def test_a_part_that_fails_or_does_not_fit_says_why_and_stops_no_other(visit, tmp_path):
    code, report, lines = visit()
    assert (code, report) == (1, {"out": str(tmp_path), "done": 1, "skipped": 2, "failed": 1})
    machine, ceilings, large, absent, long = lines
    assert (machine["part"], machine["commit"], machine["memory_gib"]) == ("machine", "abc", 80.0)
    assert ceilings["result"]["size"] == 64
    assert large["because"] == "it needs 90 GiB of the GPU, and JAX has 80.0"
    assert "No module named 'benchmarks.no_such_module'" in absent["because"]
    assert long["because"].startswith("it needs about 10000 seconds, and ")
    assert "no_such_module" in (tmp_path / "log.txt").read_text()


@pytest.mark.soak
def test_a_second_visit_continues_with_what_is_missing(visit, monkeypatch):
    visit("ceilings")
    monkeypatch.setitem(gpu.PARTS, "ceilings", Part("no_such_module", 1))
    code, report, lines = visit("ceilings", "large")
    assert (code, report["done"], report["skipped"]) == (0, 1, 1)
    assert [line["part"] for line in lines] == ["machine", "ceilings", "large"]


@pytest.mark.soak
def test_a_part_ends_at_twice_its_seconds_and_the_next_is_measured(visit, monkeypatch):
    monkeypatch.setitem(gpu.PARTS, "long", Part("ceilings --size 4096 --calls 100000", 5))
    _, report, lines = visit("long", "ceilings")
    assert (report["failed"], report["done"]) == (1, 1)
    assert lines[1]["because"] == "it took longer than 10 seconds"


def test_without_a_gpu_nothing_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit, match=str(gpu.NO_GPU)):
        gpu.main([f"--out={tmp_path / 'out'}"])
    assert "JAX sees no GPU, only cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_part_is_a_benchmark_that_is_measured_by_its_arguments():
    for part in (part for name, part in gpu.PARTS.items() if name != "compile"):
        measured = importlib.import_module(f"benchmarks.{part.line.split()[0]}").measured
        inspect.signature(measured).bind(["--flag"])


@pytest.mark.parametrize("test", often(["losses_are_those", "exact_index"], "exact_index"))
def test_no_test_of_a_device_passes_on_a_cpu(monkeypatch, test):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("DE_JAX_REHEARSAL", raising=False)
    with pytest.raises(RuntimeError, match=r"ended with 1[\s\S]*ERROR"):
        device_tests.measured(["-k", test])


def test_a_skipped_test_of_a_device_is_a_failure(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "gpu" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text("import pytest\n\ndef test_it():\n    pytest.skip('no reason')\n")
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, env={"DE_JAX_REHEARSAL": "1"})
    assert done.returncode == 1
    assert "1 failed" in done.stdout
