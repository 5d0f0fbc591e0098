"""Writes a run in the format of another program; prints one JSON object.

de-jax export_model --run_dir=runs/sde --format=sentence_transformers --out_dir=sde_for_sentence_transformers

sentence_transformers  SentenceTransformer(out_dir); different towers become query/ and document/, with a Router over both
safetensors            every parameter by its path in one file, with model.json
t5x                    out_dir/checkpoint_<step>, without an optimizer's state
peft                   the adapters of a run with `Recipe.adapters`, for peft's PeftModel.from_pretrained
serving                both towers by jax.export, and encoder.py, which runs them without this library

README.md in the folder is a model card: base model, data, loss, recipe, and this checkpoint's scores from `de-jax evaluate_*`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from de_jax import arguments, command
from de_jax.interop.export import FORMATS
from de_jax.reports import model_card


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    run = arguments.model(args)
    notes = model_card.export(run, args.out_dir, args.format, license=args.license, base_model=args.base_model)
    written = sorted(str(file.relative_to(args.out_dir)) for file in args.out_dir.rglob("*") if file.is_file())
    num_bytes = sum((args.out_dir / file).stat().st_size for file in written)
    report = {"out_dir": str(args.out_dir), "format": args.format, "step": run.step, "notes": notes, "num_bytes": num_bytes}
    print(json.dumps(report | {"files": len(written)}))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    arguments.add_model(parser, "to export", dtype=False)
    parser.add_argument("--format", required=True, choices=tuple(FORMATS))
    parser.add_argument("--out_dir", type=Path, required=True, help="a new folder; its name is the model's name in the card")
    parser.add_argument("--license", help="licence identifier of the Hugging Face hub, such as apache-2.0")
    parser.add_argument("--base_model", help="hub name of the original model; default from the run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
