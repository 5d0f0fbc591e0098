"""This library's commands as experiments call them: printed, so that any of them can be repeated by hand."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs `python -m` with these arguments to its end; returns the JSON object that it prints. The command line goes to stderr.

    Raises:
        subprocess.CalledProcessError: the command failed; its own message is on stderr.
    """
    line = [sys.executable, "-m", *arguments]
    print(shlex.join(line), file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found
