"""The peer of benchmarks.race, a program of its own: sentence-transformers' trainer, as its documentation has it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import TrainerCallback


class StepLines(TrainerCallback):
    """Adds a line to a file after each step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Called by the trainer."""
        with open(self._path, "a") as file:
            file.write(f'{{"step": {state.global_step}}}\n')


def main() -> None:
    """The command."""
    args = _parse_args()
    args.log.parent.mkdir()
    model = SentenceTransformer(args.model, device="cpu")
    model.max_seq_length = args.length
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(args.log.parent / "checkpoints"),
        num_train_epochs=1,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.rate,
        warmup_steps=args.warmup_steps,
        max_grad_norm=1.0,
        bf16=args.dtype == "bfloat16",
        use_cpu=True,
        seed=args.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_csv(str(args.pairs), cache_dir=str(args.log.parent / "cache")),
        loss=MultipleNegativesRankingLoss(model, scale=args.scale),
        callbacks=[StepLines(args.log)],
    )
    trainer.train()
    model.save_pretrained(str(args.log.parent / "model"))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in {"model": str, "pairs": str, "log": Path, "dtype": str, "rate": float, "scale": float}.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("batch_size", "length", "warmup_steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
