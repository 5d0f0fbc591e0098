"""Tests that only a GPU can pass: another platform or a skipped test is a failure."""

import os

import jax
import pytest

REHEARSAL = "DE_JAX_REHEARSAL"
"""Set where the tests are tried on a CPU, as `benchmarks.gpu --rehearse` does; its results are marked as such."""


@pytest.fixture(scope="session", autouse=True)
def device():
    platform = jax.default_backend()
    if platform != "gpu" and REHEARSAL not in os.environ:
        pytest.fail(f"JAX sees no GPU, only {platform}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"{item.nodeid} was skipped on the device: {report.longrepr}"
    return report
