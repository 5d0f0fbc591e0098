"""Fine-tunes every kind of encoder with and without a kill, and compares the results bit for bit; prints one JSON line a kind.

python -m experiments.kinds --data_dir=../shared/data/beir/scifact --minilm=all-MiniLM-L6-v2/ --out_dir=runs/kinds

Each kind starts from two small layers of random weights that transformers saves, with a vocabulary of the set's own texts. If
`--minilm` is given, BERT starts from it. `de-jax train` runs by recipes/fine_tune.gin with a fresh projection: once undisturbed,
and once killed (SIGKILL) in its second half, after an update that the kind's name decides, and started again. A line gives the
update from which the killed run continued, whether all parameters of the two runs are equal bit for bit, and the largest difference
between the embeddings of a text in a padded row and in a packed one.

Lines are kept in `<out_dir>/kinds.jsonl`: the same command continues. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from de_jax import cli, command
from de_jax.data.batches import layout
from de_jax.data.stores.corpus import tokenized
from de_jax.data.text import beir
from de_jax.files.outputs import atomic_file
from de_jax.interop.architectures import t5gemma
from de_jax.training.optim import paths
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, Run, complete_steps, load_run
from de_jax.training.run.run_log import METRICS_FILE, read_metrics
from de_jax.types import Array, Batch, InputError, Params

VOCAB_SIZE = 4000
LENGTHS = {"query": 32, "doc": 128}  # tokens
FORK = multiprocessing.get_context("fork")
"""Each training is a process of its own, which begins where all is imported and nothing else has happened."""
NUM_COMPARED = 64
"""Queries and documents, in padded rows and in packed ones."""


class Start(NamedTuple):
    """A model of transformers to start from; its classes begin with `name`."""

    name: str
    sizes: dict[str, Any]
    suffix: str = "Model"
    pad_id: int = 0


BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
GROUPED = {**BERT, "num_key_value_heads": 2, "head_dim": 16}
GEMMA = {**GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
STARTS = {
    "t5": Start("T5", {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 128}, "EncoderModel"),
    "bert": Start("Bert", BERT),
    "roberta": Start("Roberta", BERT, pad_id=1),
    "mpnet": Start("MPNet", BERT, pad_id=1),
    "distilbert": Start("DistilBert", {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}),
    "modernbert": Start("ModernBert", {**BERT, "local_attention": 16, "layer_types": ["full_attention", "sliding_attention"]}),
    "nomic_bert": Start("NomicBert", BERT),
    "gte": Start("Gte", BERT),
    "eurobert": Start("EuroBert", GROUPED),
    "llama": Start("Llama", GROUPED),
    "mistral": Start("Mistral", {**GROUPED, "sliding_window": 16}),
    "qwen2": Start("Qwen2", {**BERT, "num_key_value_heads": 2}),
    "qwen3": Start("Qwen3", GROUPED),
    "gemma3_text": Start("Gemma3", {**GEMMA, "use_bidirectional_attention": True}, "TextModel"),
    "t5gemma": Start("T5Gemma", GEMMA, "EncoderModel"),
    "t5gemma2": Start("T5Gemma2", GEMMA),
}
"""By `model_type`; one for each kind in `de_jax/interop/architectures/`."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    import torch  # noqa: F401
    import transformers  # noqa: F401, once for all processes

    args = _parse_args(argv)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    path = args.out_dir / "kinds.jsonl"
    done = {line["kind"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    for kind in args.kinds:
        if kind not in done:
            done[kind] = _record(kind, args)
            with path.open("a") as file:
                file.write(json.dumps(done[kind]) + "\n")
        print(json.dumps(done[kind]), flush=True)


def _record(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """The result for one kind."""
    folder: Path = args.out_dir / kind
    if folder.exists():
        raise InputError(f"{folder} was left by a command that was stopped; remove it.")
    is_random = kind != "bert" or args.minilm is None
    model = folder / "model" if is_random else args.minilm
    if is_random:
        vocabulary = args.out_dir / f"padding_{STARTS[kind].pad_id}.json"
        if not vocabulary.exists():  # one for all: the texts are tokenized once
            _apart(_write_vocabulary, vocabulary, args.data_dir, STARTS[kind].pad_id)
        _apart(_write_start, STARTS[kind], model)
    train = _arguments(model, args)
    if is_random:  # not in the model's folder: a class of transformers, such as Qwen2's, would read another kind of vocabulary
        train += [f"--gin.beir_pairs.{name}={vocabulary}" for name in ("tokenizer", "doc_tokenizer")]
    _apart(_train, [*train, f"--run_dir={folder / 'whole'}"])
    killed_after = random.Random(kind).randrange(args.num_steps // 2, args.num_steps - 2)
    logged, saved = _killed([*train, f"--run_dir={folder / 'killed'}"], folder / "killed", killed_after)
    _apart(_train, [*train, f"--run_dir={folder / 'killed'}"])
    told = {"kind": kind, "start": "random" if is_random else "MiniLM", "transformers": metadata.version("transformers")}
    return {**told, "killed_after": logged, "went_on_from": saved, **_apart(_compared, folder, args.data_dir)}


def _apart(function: Callable[..., Any], *args: Any) -> Any:
    """The return value of a function that runs in its own process."""
    with concurrent.futures.ProcessPoolExecutor(1, FORK) as process:
        return process.submit(function, *args).result()


def _train(arguments: list[str]) -> None:
    """`de-jax train`."""
    print(shlex.join(["de-jax", "train", *arguments]), file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(sys.stderr):
        command.run(lambda: cli.call("train", arguments))


def _compared(folder: Path, data_dir: Path) -> dict[str, Any]:
    """The killed run, compared with the undisturbed one."""
    whole, killed = (load_run(folder / name) for name in ("whole", "killed"))
    losses = [line["loss"] for line in read_metrics(folder / "whole" / METRICS_FILE)]
    return {
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(whole.params)),
        "steps": killed.step,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "parameters_are_equal": _sha256(whole.params) == _sha256(killed.params),
        "sha256": _sha256(killed.params),
        "packed_beside_padded": _packed_beside_padded(killed, data_dir),
    }


def _arguments(model: Path, args: argparse.Namespace) -> list[str]:
    """The flags of a training, except its folder."""
    settings = {
        "MODEL": model,
        "beir_pairs.dataset_dir": args.data_dir,
        "PairsOptions.batch_size": args.batch_size,
        **{f"beir_pairs.max_{tower}_length": length for tower, length in LENGTHS.items()},
        "pretrained_tower.projection_dim": 32,
        "Initialization.init_new": "('shared/projection/.*',)",
        "Optimization.learning_rate": 5e-4,
        "Optimization.num_steps": args.num_steps,
        "Logging.log_every_steps": 1,
        "Logging.save_every_steps": max(args.num_steps // 5, 1),
        "linear.warmup_steps": 0,
        "make_mesh.data": 1,
    }
    gin = [f"--gin.{name}={value}" for name, value in settings.items()]
    return ["--gin_file=recipes/fine_tune.gin", *gin]


def _killed(arguments: list[str], run_dir: Path, after: int) -> tuple[int, int]:
    """Runs a training until it has logged an update, and kills it.

    Returns:
        The last update that it logged, and that of its newest checkpoint, 0 for none.
    """
    process = FORK.Process(target=_train, args=(arguments,))
    process.start()
    while _logged(run_dir) < after:
        if not process.is_alive():
            raise SystemExit(f"the training in {run_dir} ended, code {process.exitcode}, before it could be killed.")
        time.sleep(0.005)
    process.kill()
    process.join()
    return _logged(run_dir), max(complete_steps(run_dir / CHECKPOINTS_DIR), default=0)


def _logged(run_dir: Path) -> int:
    path = run_dir / METRICS_FILE
    return max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0


def _write_start(start: Start, folder: Path) -> None:
    """Random weights, as transformers saves them."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {**start.sizes, "vocab_size": VOCAB_SIZE, "pad_token_id": start.pad_id}
    if start.name == "T5Gemma":
        sizes = {"encoder": sizes, "decoder": sizes, "is_encoder_decoder": False, "vocab_size": VOCAB_SIZE}
    if start.name == "T5Gemma2":
        encoder = {"text_config": sizes, "vision_config": t5gemma.NO_IMAGES, "eoi_token_index": VOCAB_SIZE - 1}
        sizes = {"encoder": encoder, "decoder": sizes, "vocab_size": VOCAB_SIZE}
    of = f"{start.name}TextConfig" if start.suffix == "TextModel" else f"{start.name}Config"
    model = getattr(transformers, start.name + start.suffix)(getattr(transformers, of)(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # kernels near 0 would hide what attention sees
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def _write_vocabulary(file: Path, data_dir: Path, pad_id: int) -> None:
    """WordPiece of the documents, with [CLS] and [SEP] around a text."""
    import tokenizers

    specials = ["[UNK]", "[CLS]", "[SEP]"]
    specials.insert(pad_id, "[PAD]")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator((text for _, text in beir.iter_docs(beir.find_file(data_dir, "corpus"))), trainer)
    around = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)
    with atomic_file(file) as temporary:
        tokenizer.save(str(temporary))


def _sha256(params: Params) -> str:
    digest = hashlib.sha256()
    for path, leaf in sorted(paths.by_path(params).items()):
        digest.update(path.encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _packed_beside_padded(run: Run, data_dir: Path) -> float:
    """The largest difference of an embedding's value, over the first texts of each side."""
    texts = {
        "query": beir.iter_queries(beir.find_file(data_dir, "queries")),
        "doc": beir.iter_docs(beir.find_file(data_dir, "corpus")),
    }
    rows, laid_out = np.arange(NUM_COMPARED), []
    for tower, found in texts.items():
        side = run.side(tower)
        store = tokenized([text for _, text in itertools.islice(found, NUM_COMPARED)], side.tokenizer)
        shape = layout.packings({tower: layout.Sample(store, side.max_length, [rows])})[tower]
        layouts = layout.padded(store, side.max_length, length_multiple=8), layout.packed_as(shape, store, side.max_length)
        laid_out.append([lay_out(rows, 0) for lay_out in layouts])
    padded, packed = (_embeddings(run, query, doc) for query, doc in zip(*laid_out, strict=True))
    return float(f"{np.abs(padded - packed).max():.2g}")


def _embeddings(run: Run, query: Any, doc: Any) -> Array:
    """[2, `NUM_COMPARED`, D], queries and documents."""
    ids = np.arange(NUM_COMPARED, dtype=np.int32)
    found = jax.jit(run.model.embed)(run.params, Batch(query, doc, ids, ids))
    return np.stack([found.query, found.doc])


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--data_dir", type=Path, required=True, help="a BEIR folder with a split train")
    parser.add_argument("--out_dir", type=Path, required=True, help="gets two runs a kind, and kinds.jsonl")
    parser.add_argument("--minilm", type=Path, help="all-MiniLM-L6-v2; by default BERT starts at random too")
    parser.add_argument("--kinds", nargs="+", choices=list(STARTS), default=list(STARTS), help="default all")
    parser.add_argument("--num_steps", type=int, default=20, help="updates (default 20)")
    parser.add_argument("--batch_size", type=int, default=16, help="pairs (default 16)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
