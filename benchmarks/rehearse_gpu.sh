#!/usr/bin/env bash
# Rehearses benchmarks/gpu_visit.sh on a CPU, in small sizes and without network: a copy of the tracked files and the wheels of .whl/,
# in a Python 3.12 environment with the packages of a GPU machine. Needs uv and about 6 GB; ten minutes on two cores.
#   bash benchmarks/rehearse_gpu.sh <folder of the environment> [flags of benchmarks.gpu]
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$1 && shift
if [ ! -e "$environment/bin/python3" ]; then
  uv venv --seed --python 3.12 "$environment"
  uv pip install --python "$environment/bin/python3" jax==0.11.2 flax==0.12.12 optax orbax-checkpoint tensorstore tokenizers==0.23.2 \
    sentencepiece==0.2.2 transformers==5.17.0 sentence-transformers==6.0.1 torch==2.11.0 peft scipy scikit-learn safetensors pytest \
    pytest-timeout jaxtyping matplotlib huggingface_hub msgpack pyyaml protobuf flatbuffers absl-py
fi
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z | xargs -0 cp --parents --no-dereference -t "$copy"
if [ -d .whl ]; then cp -r .whl "$copy/"; fi
PATH="$environment/bin:$PATH" unshare --net --map-root-user bash "$copy/benchmarks/gpu_visit.sh" --out="$PWD/gpu_rehearsal" --rehearse "$@"
cat gpu_rehearsal/results.jsonl
