"""Flags shared by several commands: the scored run, the scoring policy, the table to read."""

from __future__ import annotations

import argparse
import json
import sys
import typing
from collections.abc import Sequence

from de_jax import engine
from de_jax.command import Parser
from de_jax.data.text import input_policy
from de_jax.data.text.sides import Side
from de_jax.data.text.table_files import Table
from de_jax.data.text.tokenizing import with_prompt
from de_jax.evaluation import metrics
from de_jax.evaluation.task import Policy
from de_jax.interop import any_model
from de_jax.models import processor
from de_jax.retrieval import expanded_search, faiss_index, milvus_index
from de_jax.retrieval.expanded_search import Expansion
from de_jax.retrieval.parts import Part
from de_jax.settings import NonNegativeFloat, PositiveInt, Share, numeric
from de_jax.training.mesh import distributed
from de_jax.training.run.run_folder import Run
from de_jax.types import InputError

OF_EXPANSION = ("expand_as", "num_generated", "max_generated_length")
OF_RUN = (
    *("step", "max_query_length", "max_doc_length", "max_passages", "query_prompt", "doc_prompt", "embedding_dim", "dtype"),
    *("index", "nprobe", "ef_search", "faiss_device", "faiss_gpu_mode", "faiss_float16", "faiss_on_disk"),
    *("passage_length", "passage_stride", "expand_as", "max_generated_length", "no_bm25"),
)
"""Flags of `add` without a meaning for BM25 alone, which reads whole documents, generated queries behind them."""
OF_BM25 = ("k1", "b")


def add(parser: argparse.ArgumentParser, *, measures: Sequence[str] = (), beir: bool = False) -> None:
    """Adds the flags of a run and of a policy.

    Args:
        parser: gets them.
        measures: the default; without measures the command's own help names it.
        beir: apply BEIR's rule for identical ids. Elsewhere ids of queries and documents may be equal by chance.
    """
    add_run(parser)
    default = " ".join(measures) or "see above"
    policy = parser.add_argument_group("scoring")
    policy.add_argument("--measures", nargs="+", default=list(measures), help=f"names of ir-measures; default {default}")
    policy.add_argument(
        "--min_relevance", type=int, default=1, help="lowest relevant grade for MRR, recall and similar measures (default 1)"
    )
    policy.add_argument(
        "--depth",
        type=int,
        help="ranked documents per query; default the largest cut-off of the measures, at least "
        f"{metrics.MIN_DEPTH}, and {metrics.UNCUT_DEPTH} for a measure without one",
    )
    input_policy.add_flags(policy, identical_ids=beir)
    policy.add_argument("--no_bm25", action="store_true", help="skip BM25 and its fusion with the run")
    policy.add_argument("--k1", type=numeric(NonNegativeFloat), default=0.9, help="BM25's k1 (default 0.9)")
    policy.add_argument("--b", type=numeric(Share), default=0.4, help="BM25's b (default 0.4)")
    policy.add_argument(
        "--passage_length", type=int, help="cut documents into passages of this many tokens; the best passage counts"
    )
    policy.add_argument("--passage_stride", type=int, help="tokens between passage starts; default without overlap")
    add_expansion(policy)


def add_expansion(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the flags of document expansion."""
    parser.add_argument("--expansion", help="generated queries of the corpus (from de-jax doc2query), to expand its documents")
    parser.add_argument(
        "--expand_as", choices=expanded_search.FORMS, default="views", help="form of the expanded documents (default views)"
    )
    parser.add_argument("--num_generated", type=int, default=10, help="generated queries used per document (default 10)")
    parser.add_argument("--max_generated_length", type=int, default=32, help="tokens of a generated query (default 32)")


def parsed(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command that has the flags of `add` or `add_expansion`; see `check`."""
    args = parser.parse_args(argv)
    check(parser, args)
    return args


def check(parser: Parser, args: argparse.Namespace) -> None:
    """Refuses flags of `add` or `add_expansion` that have no meaning beside the others.

    Raises:
        InputError: a flag of the run without one, of BM25 where it is left out, or of document expansion without generated queries.
    """
    if not args.expansion:
        parser.refuse_without(args, OF_EXPANSION, "--expansion")
    if not hasattr(args, "no_bm25"):  # `add_expansion` alone
        return
    if args.run_dir is None:
        parser.refuse_without(args, OF_RUN, "--run_dir")
    if args.no_bm25:
        parser.refuse(args, OF_BM25, beside="--no_bm25")


def add_model(parser: argparse._ActionsContainer, use: str, *, dtype: bool = True) -> None:
    """Adds the flags that select a model, which `model` opens; `use` ends their help: "to search with"."""
    parser.add_argument("--run_dir", required=True, help=f"the model {use}: a run, a folder with a model, or a hub name")
    parser.add_argument("--step", help="checkpoint of a run: a step, or best; default the newest")
    if dtype:
        add_dtype(parser)


def model(args: argparse.Namespace) -> Run:
    """The model of the flags of `add_model`; assumptions about it go to stderr.

    Raises:
        InputError: no such model or checkpoint.
    """
    found = any_model.open_model(args.run_dir, args.step, dtype=dtype(args) if hasattr(args, "dtype") else None)
    for note in found.notes:
        print(note, file=sys.stderr)
    return found


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that select the model, its lengths and prompts, and the index."""
    run = parser.add_argument_group("the run")
    run.add_argument("--run_dir", help="the model to score: a run, a folder with a model, or a hub name; default BM25 alone")
    run.add_argument("--step", help="checkpoint of a run: a step, or best; default the newest")
    run.add_argument("--max_query_length", type=int, help="tokens; default the run's")
    run.add_argument("--max_doc_length", type=int, help="tokens; default the run's")
    run.add_argument("--max_passages", type=int, help="passages of max_doc_length per document; the best counts; default the run's")
    run.add_argument(
        "--query_prompt", type=str, help='text before every query, such as "query: "; default the run\'s; "" removes it'
    )
    run.add_argument("--doc_prompt", type=str, help="text before every document; default the run's")
    run.add_argument("--embedding_dim", type=int, help="use the first dimensions only, for a Matryoshka model; default all")
    add_dtype(run)
    add_search(run)


def add_dtype(parser: argparse._ActionsContainer) -> None:
    """Adds the flag that selects the precision of encoding."""
    parser.add_argument(
        "--dtype",
        choices=("auto", *typing.get_args(processor.Dtype)),
        default="auto",
        help="type of matrix products in encoding; default bfloat16 where the device multiplies it natively, else float32. Jobs on "
        "different devices that share work need the same one",
    )


def dtype(args: argparse.Namespace) -> processor.Dtype:
    """The precision of encoding that --dtype selects; says on stderr what "auto" chose."""
    if args.dtype != "auto":
        return args.dtype
    chosen = processor.fast_dtype()
    print(f"encoding in {chosen}, chosen for this device ({processor.family()}); --dtype sets it", file=sys.stderr)
    return chosen


def add_search(parser: argparse._ActionsContainer) -> None:
    """Adds the flags that select the index of documents."""
    parser.add_argument(
        "--index", type=str, default="exact", help="exact (default), a FAISS factory string such as IVF1024,Flat, or milvus:URI"
    )
    add_faiss(parser)


def add_faiss(parser: argparse._ActionsContainer) -> None:
    """Adds the flags of FAISS, None where they are not given."""
    parser.add_argument("--nprobe", type=int, help="inverted lists to visit in an IVF index (default a sixteenth)")
    parser.add_argument("--ef_search", type=int, help="candidates to keep in an HNSW index")
    parser.add_argument(
        "--faiss_device", choices=faiss_index.DEVICES, help="device on which FAISS fills and searches (default cpu)"
    )
    parser.add_argument(
        "--faiss_gpu_mode", choices=faiss_index.GPU_MODES, help="use of several GPUs: a shard each, or copies (default shard)"
    )
    parser.add_argument("--faiss_float16", action="store_true", help="the GPU stores vectors in half precision")
    parser.add_argument(
        "--faiss_on_disk", action="store_true", help="keep the lists of an IVF index in a file, for corpora beyond memory"
    )


def search_options(args: argparse.Namespace) -> faiss_index.SearchOptions:
    """The options of FAISS by the flags of `add_faiss`."""
    options = faiss_index.SearchOptions(args.nprobe, args.ef_search, float16=args.faiss_float16, on_disk=args.faiss_on_disk)
    given = {"device": args.faiss_device, "gpu_mode": args.faiss_gpu_mode}
    return options._replace(**{name: value for name, value in given.items() if value is not None})


def named(flag: str, values: Sequence[str]) -> dict[str, str]:
    """The values of a flag of the form NAME=VALUE, by name.

    Raises:
        InputError: a value without a name, or a repeated name.
    """
    found: dict[str, str] = {}
    for argument in values:
        name, _, value = argument.partition("=")
        if not name or not value or name in found:
            raise InputError(f"{flag} has {argument!r}; give each name once, as name=value.")
        found[name] = value
    return found


def expansion(args: argparse.Namespace) -> Expansion | None:
    """The expansion selected by the flags of `add_expansion`, or None.

    Raises:
        InputError: an invalid value.
    """
    if not args.expansion:
        return None
    found = Expansion(args.expansion, args.num_generated, args.expand_as, args.max_generated_length)
    found.check()
    return found


def policy(args: argparse.Namespace) -> Policy:
    """The scoring policy selected by the flags; loads nothing.

    Raises:
        InputError: a depth too small for the measures, an unknown measure or index, a value out of range.
    """
    measures = metrics.with_min_relevance(args.measures, args.min_relevance)
    deepest = metrics.deepest(measures)
    depth = metrics.default_depth(measures) if args.depth is None else args.depth
    if depth < deepest or depth < 1:
        raise InputError(f"--depth is {depth}; ask for at least {max(1, deepest)} documents, the depth of the measures.")
    search, expanded = search_options(args), expansion(args)
    if args.index.startswith(milvus_index.PREFIX) and (args.embedding_dim or (expanded and expanded.is_typical)):
        raise InputError(
            "Milvus holds embeddings as the model gives them; leave --embedding_dim and --expand_as=typical out, or take another "
            "--index."
        )
    faiss_index.index_builder(args.index, search)
    if args.passage_stride and not args.passage_length:
        raise InputError("--passage_stride is for passages; give --passage_length too.")
    if args.expansion and args.passage_length:
        raise InputError("--expansion is for whole documents; leave --passage_length out.")
    return Policy(
        measures=measures,
        depth=depth,
        drop_identical_ids=not getattr(args, "keep_identical_ids", True),
        skip_empty=args.skip_empty,
        bm25=not args.no_bm25,
        k1=args.k1,
        b=args.b,
        embedding_dim=args.embedding_dim,
        passage_length=args.passage_length,
        passage_stride=args.passage_stride,
        index_choice=args.index,
        search=search,
        expansion=expanded,
    )


def run(args: argparse.Namespace) -> Run | None:
    """The run with the lengths and prompts of the flags, or None without --run_dir.

    Raises:
        InputError: the run is missing, or its model cannot take the length.
    """
    if args.run_dir is None:
        return None
    loaded = model(args)
    query = _changed(loaded, "query", args.max_query_length, args.query_prompt)
    doc = _changed(loaded, "doc", args.max_doc_length, args.doc_prompt)
    if args.max_passages is not None:
        if args.max_passages < 1:
            raise InputError(f"--max_passages is {args.max_passages}; give a document at least 1.")
        doc = doc._replace(max_passages=args.max_passages)
    if args.passage_length:
        loaded.model.check_length("doc", args.passage_length)
    return loaded._replace(query=query, doc=doc)


def _changed(run: Run, tower: str, max_length: int | None, prompt: str | None) -> Side:
    """A side of a run, with the length and prompt of the flags if given."""
    if max_length is not None and max_length < 1:
        raise InputError(f"--max_{tower}_length is {max_length}; give at least 1 token.")
    side = run.side(tower)
    side = side._replace(tokenizer=with_prompt(side.tokenizer, prompt), max_length=max_length or side.max_length)
    run.model.check_length(tower, side.max_length)
    return side


def add_shard(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name one of several jobs."""
    jobs = parser.add_argument_group(
        "several machines",
        "a Ray cluster, or jobs of the same command in any order, each with its own number; all see the same folders or addresses. "
        "Then the same command without a number joins their shards.",
    )
    which = jobs.add_mutually_exclusive_group()
    which.add_argument("--engine", choices=["ray"], help="do the work on the Ray cluster of RAY_ADDRESS, or of this machine")
    which.add_argument("--shard", help="number of this job and how many there are, such as 0/4; default one job")
    which.add_argument(
        "--distributed", action="store_true", help="take both numbers from the TPU pod, SLURM, Kubernetes or MPI that started this"
    )
    jobs.add_argument("--num_shards", type=numeric(PositiveInt), help="tasks of --engine; default as many as can run at once")


def by_engine(args: argparse.Namespace, module: str, argv: Sequence[str] | None) -> bool:
    """Whether --engine did the command's work, by this module's `main`; it then has printed the command's output."""
    if not args.engine:
        if args.num_shards:
            raise InputError("--num_shards is for --engine; with --shard=0/4 each job gets a number.")
        return False
    for report in engine.run(module, argv, args.num_shards):
        print(json.dumps(report))
    return True


def part(args: argparse.Namespace) -> Part | None:
    """The part of the work that --shard or --distributed names; None for all of it.

    Raises:
        InputError: not such a part, no cluster that says so, or a process that cannot compute by itself.
    """
    if not args.shard and not args.distributed:
        return None
    found = Part.of(args.shard) if args.shard else Part(*distributed.place())
    distributed.check_alone()
    return found


def shard(args: argparse.Namespace, *, is_run: bool = True) -> Part | None:
    """`part`, for a command that is given its checkpoint.

    Args:
        args: the flags.
        is_run: whether the model has checkpoints.

    Raises:
        InputError: as `part` does, or no --step, without which two jobs might take two checkpoints.
    """
    flag = next((f"--{name}" for name in ("engine", "shard", "distributed") if getattr(args, name)), None)
    if flag and is_run and not str(args.step).isdecimal():
        raise InputError(f"{flag} needs the number of a checkpoint in --step, so that all jobs take the same one.")
    return part(args)


def add_table(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that locate and describe a table."""
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="a file, a datasets folder or a name on the Hugging Face hub")
    group = parser.add_argument_group("reading the table")
    group.add_argument(
        "--columns",
        nargs="+",
        default=[],
        type=str,
        metavar="NAME=COLUMN",
        help="the table's columns for query, doc, neg_docs, ...",
    )
    group.add_argument("--header", type=str, default="", help="comma-separated columns, for a file without a header line")
    group.add_argument("--split", default="train", help="split of a datasets folder or of the hub (default train)")
    group.add_argument("--subset", default="", help="subset of a data set on the hub")
    group.add_argument("--skip_bad_rows", action="store_true", help="skip and count unusable rows instead of refusing them")


def table(args: argparse.Namespace) -> Table:
    """The table that the flags of `add_table` name.

    Raises:
        InputError: --columns without "=".
    """
    if wrong := [setting for setting in args.columns if "=" not in setting]:
        raise InputError(f"--columns {wrong[0]!r} names no column; write for example query={wrong[0]}.")
    columns = {name: column for name, _, column in (setting.partition("=") for setting in args.columns)}
    source = args.tables[0] if len(args.tables) == 1 else tuple(args.tables)
    header = tuple(args.header.split(",")) if args.header else ()
    return Table(source, header, args.split, args.subset, columns, args.skip_bad_rows)
