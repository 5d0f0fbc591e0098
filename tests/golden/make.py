"""Writes the golden files again, by the tests that compare them: `python -m tests.golden.make`. Only for an intended change."""

import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    os.environ["DE_JAX_GOLDEN_WRITE"] = "1"
    sys.exit(pytest.main(["-q", "-n", "0", str(Path(__file__).parent)]))
