#!/usr/bin/env bash
# Random kills in number, every mesh, long fuzzing: bash tests/soak.sh --kills=1000 --seed=7. Ends with one JSON line.
set -euo pipefail
cd "$(dirname "$0")/.."
python tests/soak.py "$@"
