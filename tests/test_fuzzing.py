"""Damaged files of every reader give the right value, or one sentence with the file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = json.loads(os.environ.get("DE_JAX_SOAK", "{}"))
ENOUGH = 2000
"""Cases of which each reader has its share."""


@pytest.mark.soak
@pytest.mark.short_soak
def test_damaged_files_are_read_right_or_refused_by_name():
    """In a process of its own, whose memory and seconds are bounded."""
    count, seed = SOAK.get("fuzz", ENOUGH), SOAK.get("seed", 0)
    command = [sys.executable, str(Path(__file__).with_name("fuzzing.py")), f"--count={count}", f"--seed={seed}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert not summary["failures"], summary["failures"]
    if count >= ENOUGH:
        cases = {name: number + summary["refused"][name] for name, number in summary["accepted"].items()}
        assert min(cases.values()) >= 5, cases
        # Readers that refuse everything would pass.
        assert sum(number > 0 for number in summary["accepted"].values()) > 0.9 * len(cases)
        assert sum(summary["accepted"].values()) > count / 5
