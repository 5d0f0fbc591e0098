#!/usr/bin/env bash
# Builds the wheel, installs it alone into a fresh environment and runs it there as a user does (tests/installed_wheel.py).
# Python 3.13 or 3.12 where one is found, as newer releases of JAX need them; else the Python of this environment.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

newest_python() {
  local candidate
  for candidate in python3.13 python3.12 $(ls -r ~/.pyenv/versions/3.1[23]*/bin/python 2>/dev/null); do
    # A shim of pyenv is on the path also where it runs nothing.
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo python
}

python=$(newest_python)
pip_options=(--quiet --disable-pip-version-check)
# A copy of the tracked files: setuptools leaves build/ behind, and would put what lies there into the next wheel.
mkdir "$work/source" "$work/elsewhere"
git ls-files -z | xargs -0 cp --parents -t "$work/source"
python -m pip wheel "${pip_options[@]}" --no-deps --wheel-dir "$work" "$work/source"
"$python" -m venv "$work/venv"
SECONDS=0
# --no-compile: most of what is installed is never imported.
"$work/venv/bin/python" -m pip install "${pip_options[@]}" --no-compile "$work"/de_jax_retrieval-*.whl
echo "$SECONDS s  installed the wheel"
cd "$work/elsewhere"
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 DE_JAX_CACHE="$work/cache" JAX_PLATFORMS=cpu
unset PYTHONPATH
"$work/venv/bin/python" "$root/tests/installed_wheel.py"
