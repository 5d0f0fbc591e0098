"""`de-jax <verb>`: the trainer and every tool under one name; each verb is a module that also runs as `python -m`."""

from __future__ import annotations

import difflib
import importlib
import sys

from de_jax import command

GROUPS = {
    "Start here": {
        "quickstart": ("de_jax.tools.quickstart", "build a data set, train, index, search and score, in minutes"),
        "doctor": ("de_jax.tools.doctor", "check this installation: versions, devices, extras, caches, disk"),
        "completion": ("de_jax.tools.completion", "print a script for Tab completion in bash, zsh or fish"),
    },
    "Models": {
        "import_model": ("de_jax.tools.import_model", "turn a model of Hugging Face, sentence-transformers or T5X into a run"),
        "export_model": ("de_jax.tools.export_model", "write a run for sentence-transformers, T5X, safetensors, peft or serving"),
        "push_to_hub": ("de_jax.tools.push_to_hub", "upload an exported folder to the Hugging Face hub (dry run by default)"),
        "inspect_run": ("de_jax.tools.inspect_run", "show a run: settings, curves, parameters, shared parts"),
        "verify": ("de_jax.tools.verify", "check the checksums of a run, a token store or embeddings"),
    },
    "Data": {
        "import_pairs": ("de_jax.tools.import_pairs", "make training data from a table: csv, tsv, jsonl, parquet, Arrow, datasets"),
        "import_openqa": ("de_jax.tools.import_openqa", "make a BEIR folder of DPR's passages, questions and answers"),
        "import_negatives": ("de_jax.tools.import_negatives", "make hard negatives from a table or a TREC run"),
        "export_negatives": ("de_jax.tools.export_negatives", "write a generation of hard negatives as jsonl"),
        "build_pydocs": ("de_jax.tools.build_pydocs", "build a retrieval data set from this machine's docstrings"),
        "tokenize_corpus": ("de_jax.tools.tokenize_corpus", "tokenize texts, optionally with a newly trained vocabulary"),
        "export_batches": ("de_jax.tools.export_batches", "write a seqio task as tokens, for training without TensorFlow"),
    },
    "Training": {
        "train": ("de_jax.trainer", "train a dual encoder from a gin recipe"),
        "daft": ("de_jax.tools.daft", "make small query towers for a model, and plot quality against speed"),
        "mine": ("de_jax.mine", "mine hard negatives beside a run, from each new checkpoint"),
        "mine_negatives": ("de_jax.tools.mine_negatives", "mine hard negatives for training pairs with a run or BM25"),
        "score_pairs": ("de_jax.tools.score_pairs", "score training pairs and negatives with a teacher, for distillation"),
        "encode_guide": ("de_jax.tools.encode_guide", "embed training texts with a guide model, to mask false negatives"),
        "doc2query": ("de_jax.tools.doc2query", "train a query generator, and generate queries for a corpus"),
        "plan_run": ("de_jax.tools.plan_run", "compile a recipe for remote devices: memory, FLOPs, collectives"),
    },
    "Search": {
        "encode_corpus": ("de_jax.tools.encode_corpus", "embed a corpus with a run"),
        "export_index": ("de_jax.tools.export_index", "write a corpus's embeddings as parquet, or into Milvus"),
        "search": ("de_jax.tools.search", "search a corpus with a run: one query, or a prompt"),
        "demo": ("de_jax.tools.demo", "open a page to try a model beside BM25, their fusion and a second model"),
    },
    "Evaluation": {
        "evaluate_beir": ("de_jax.tools.evaluate_beir", "score a run on BEIR data sets, with BM25 and fusion"),
        "evaluate_nanobeir": (
            "de_jax.tools.evaluate_nanobeir",
            "score a run on NanoBEIR's 13 small sets, from a folder or the hub",
        ),
        "evaluate_msmarco": ("de_jax.tools.evaluate_msmarco", "score a run on MS MARCO's passages or documents"),
        "evaluate_trec": ("de_jax.tools.evaluate_trec", "score a run, or a TREC run file, on any topics and judgements"),
        "evaluate_sentences": ("de_jax.tools.evaluate_sentences", "score a run on answer sentences, as in MultiReQA"),
        "evaluate_openqa": ("de_jax.tools.evaluate_openqa", "score a run by the answers in its passages (open-domain QA)"),
        "evaluate_pairs": ("de_jax.tools.evaluate_pairs", "score a run on the dev split of a folder of pairs"),
        "compare_runs": ("de_jax.tools.compare_runs", "test whether systems differ significantly"),
        "compare_expansions": ("de_jax.tools.compare_expansions", "score runs on documents expanded with generated queries"),
        "measure_query_latency": ("de_jax.tools.measure_query_latency", "measure the latency of query towers"),
    },
    "Analysis": {
        "analyse_embeddings": ("de_jax.tools.analyse_embeddings", "analyse a run's embeddings: maps, distances, groups (HTML)"),
        "analyse_negatives": ("de_jax.tools.analyse_negatives", "analyse negatives: loss, gradients, overlap, mining cost (HTML)"),
    },
}
"""The verbs as `--help` shows them: {group: {verb: (module, summary)}}."""
VERBS = {verb: entry for group in GROUPS.values() for verb, entry in group.items()}


def main() -> None:
    """Runs the verb named by the first argument with the rest of the command line."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb not in VERBS:
        if verb in ("--help", "-h"):
            print(_usage())
            sys.exit()
        near = difflib.get_close_matches(verb, VERBS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        print(f"{_usage()}\n\n'{verb}' is not a verb of de-jax{hint}.", file=sys.stderr)
        sys.exit(command.EXIT_INPUT)
    module = importlib.import_module(VERBS[verb][0])
    sys.argv = [f"de-jax {verb}", *sys.argv[2:]]
    command.run(module.main)


def _usage() -> str:
    lines = ["usage: de-jax <verb> [--help] ..."]
    for group, verbs in GROUPS.items():
        lines += ["", group, *(f"  {name:<23}{summary}" for name, (_, summary) in verbs.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
