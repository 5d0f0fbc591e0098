"""`de-jax <verb>`: the trainer and every tool under one name; each verb is a module that also runs as `python -m`."""

from __future__ import annotations

import importlib
import sys

from de_jax import command

VERBS = {
    "quickstart": ("de_jax.tools.quickstart", "build data, train, index, search and score, in minutes"),
    "import_model": ("de_jax.tools.import_model", "make a run of a model from Hugging Face, sentence-transformers or T5X"),
    "export_model": ("de_jax.tools.export_model", "write a run for sentence-transformers, T5X, safetensors or jax.export"),
    "push_to_hub": ("de_jax.tools.push_to_hub", "send an exported folder to the Hugging Face hub, dry by default"),
    "train": ("de_jax.trainer", "train a dual encoder from a gin recipe"),
    "daft": ("de_jax.tools.daft", "give a model light query towers, and show what their speed costs"),
    "measure_query_latency": ("de_jax.tools.measure_query_latency", "time query towers beside each other"),
    "doc2query": ("de_jax.tools.doc2query", "train a generator of queries, and write queries for a corpus"),
    "import_pairs": ("de_jax.tools.import_pairs", "make training data of a table: csv, tsv, jsonl, parquet, Arrow, datasets"),
    "import_negatives": ("de_jax.tools.import_negatives", "make hard negatives of a table or of a TREC run"),
    "build_pydocs": ("de_jax.tools.build_pydocs", "build the embedded data set from docstrings"),
    "tokenize_corpus": ("de_jax.tools.tokenize_corpus", "tokenize texts, with a trained vocabulary if wanted"),
    "export_batches": ("de_jax.tools.export_batches", "write a seqio task as tokens, to train without TensorFlow"),
    "encode_corpus": ("de_jax.tools.encode_corpus", "write a corpus's embeddings by a run"),
    "search": ("de_jax.tools.search", "search a corpus with a run, one query or many"),
    "mine": ("de_jax.mine", "mine hard negatives beside a run, from every new checkpoint"),
    "mine_negatives": ("de_jax.tools.mine_negatives", "mine hard negatives for training pairs, by a run or by BM25"),
    "score_pairs": ("de_jax.tools.score_pairs", "score training pairs and negatives by a teacher, to learn from it"),
    "encode_guide": ("de_jax.tools.encode_guide", "embed training texts by another model, to mask false negatives by it"),
    "evaluate_beir": ("de_jax.tools.evaluate_beir", "score a run on BEIR data sets, beside and with BM25"),
    "evaluate_nanobeir": ("de_jax.tools.evaluate_nanobeir", "score a run on NanoBEIR's 13 small sets, from a folder or the hub"),
    "evaluate_msmarco": ("de_jax.tools.evaluate_msmarco", "score a run on MS MARCO's passages or documents"),
    "evaluate_trec": ("de_jax.tools.evaluate_trec", "score a run, or a run file, on any topics and judgements"),
    "evaluate_sentences": ("de_jax.tools.evaluate_sentences", "score a run on answer sentences, as MultiReQA does"),
    "evaluate_openqa": ("de_jax.tools.evaluate_openqa", "score a run by the answers in the passages it finds"),
    "compare_expansions": ("de_jax.tools.compare_expansions", "score runs on documents with generated queries, in every form"),
    "compare_runs": ("de_jax.tools.compare_runs", "say whether systems differ by more than chance"),
    "plan_run": ("de_jax.tools.plan_run", "compile a recipe for devices that are not there: memory, FLOPs, collectives"),
    "evaluate_pairs": ("de_jax.tools.evaluate_pairs", "score a run on the dev split of a folder of pairs"),
    "verify": ("de_jax.tools.verify", "read every file of a run, store or embeddings for its checksum"),
    "inspect_run": ("de_jax.tools.inspect_run", "show a run: settings, curves, parameters, what is shared"),
    "analyse_embeddings": ("de_jax.tools.analyse_embeddings", "look into a run's embeddings: maps, distances, groups, as HTML"),
    "analyse_negatives": ("de_jax.tools.analyse_negatives", "show which negatives teach a run, and what they cost, as HTML"),
}


def main() -> None:
    """Runs the verb named by the first argument with the rest of the command line."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb not in VERBS:
        is_asked = verb in ("--help", "-h")
        print(_usage() if is_asked else f"{_usage()}\n\n'{verb}' is not a verb of de-jax.", file=None if is_asked else sys.stderr)
        sys.exit(0 if is_asked else command.EXIT_INPUT)
    module = importlib.import_module(VERBS[verb][0])
    sys.argv = [f"de-jax {verb}", *sys.argv[2:]]
    command.run(module.main)


def _usage() -> str:
    return "\n".join(["usage: de-jax <verb> [--help] ...\n", *(f"  {name:<23}{summary}" for name, (_, summary) in VERBS.items())])


if __name__ == "__main__":
    main()
