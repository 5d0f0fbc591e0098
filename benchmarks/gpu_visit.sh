#!/usr/bin/env bash
# Measures on a machine with a GPU that reaches no network: installs the wheels of .whl/ and runs benchmarks.gpu from this checkout.
#   bash benchmarks/gpu_visit.sh --out=gpu_results --seconds=540
set -euo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d)
if compgen -G '.whl/*.whl' > /dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --target "$site" .whl/*.whl
fi
# The package as an installation has it, without building one.
for folder in tools tasks gin_configs; do ln -sfn "../$folder" "de_jax/$folder"; done
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python3 -m benchmarks.gpu "$@"
