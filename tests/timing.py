"""A table at the end of every test run: the processor seconds of each folder, the slowest tests, and the largest worker."""

import os
import resource
from collections import Counter

import pytest

NUM_SLOWEST = 25
SECONDS, MEMORY = "processor_seconds", "peak_mib"


def processor_seconds():
    """User and system seconds of this process and of the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Measures a test with its fixtures; a shared fixture counts for the first test that asks for it."""
    item.stash[_BEGAN] = processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties.append((SECONDS, processor_seconds() - item.stash[_BEGAN]))
        report.user_properties.append((MEMORY, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    return report


_BEGAN = pytest.StashKey[float]()


def pytest_terminal_summary(terminalreporter):
    reports = [
        report for found in terminalreporter.stats.values() for report in found if getattr(report, "when", None) == "teardown"
    ]
    measured = [(dict(report.user_properties), report.nodeid) for report in reports]
    rows = sorted(((found[SECONDS], nodeid) for found, nodeid in measured if SECONDS in found), reverse=True)
    if not rows:
        return
    folders = Counter()
    for seconds, nodeid in rows:
        folders["/".join(nodeid.split("::")[0].split("/")[:2])] += seconds
    terminalreporter.section("processor seconds")
    for folder, seconds in folders.most_common():
        terminalreporter.write_line(f"{seconds:8.1f}  {folder}")
    terminalreporter.write_line(f"{sum(folders.values()):8.1f}  all tests; the {NUM_SLOWEST} slowest:")
    for seconds, nodeid in rows[:NUM_SLOWEST]:
        terminalreporter.write_line(f"{seconds:8.1f}  {nodeid}")
    terminalreporter.write_line(f"largest worker: {max(found[MEMORY] for found, _ in measured):.0f} MiB")
