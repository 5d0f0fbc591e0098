"""The static model of WordLlama's Python package as a folder of sentence-transformers.

pip install --no-deps --target=wordllama wordllama==0.4.0.post1
python -m experiments.static_model --package=wordllama/wordllama --out_dir=static
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer

from de_jax.files import outputs

NAME = "l2_supercat"
MODULES = ("StaticEmbedding", "Normalize")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--out_dir", type=Path, required=True)
    args = parser.parse_args()
    (table,) = safetensors.numpy.load_file(args.package / "weights" / f"{NAME}_256.safetensors").values()
    tokenizer = Tokenizer.from_file(str(args.package / "tokenizers" / f"{NAME}_tokenizer_config.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    folder = args.out_dir / "0_StaticEmbedding"
    folder.mkdir(parents=True)
    safetensors.numpy.save_file({"embedding.weight": table.astype(np.float32)}, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{name}", "type": f"sentence_transformers.models.{name}"}
        for place, name in enumerate(MODULES)
    ]
    outputs.write_json(args.out_dir / "modules.json", modules)


if __name__ == "__main__":
    main()
