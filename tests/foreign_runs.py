"""Run files and judgements as other people's programs write them, made without a random generator.

`python tests/foreign_runs.py` prints what trec_eval gives for each of them, by pytrec_eval (pytrec_eval-terrier 0.5.11).
The constants in test_trec_conformance.py are that output.
"""

import json
import math

NUM_QUERIES, NUM_DOCS = 12, 40
MEASURES = {"nDCG@10": "ndcg_cut_10", "nDCG": "ndcg", "RR": "recip_rank", "AP": "map", "R@20": "recall_20", "P@5": "P_5"}


def mixed(*numbers):
    """A number below 2**32 that looks random."""
    state = 2166136261
    for number in numbers:
        state = (state ^ number) * 16777619 % 2**32
        state = (state ^ state >> 13) * 1274126177 % 2**32
    return state


def doc_id(number):
    """Upper and lower case, digits, and letters that UTF-8 writes in two to four bytes."""
    return ("D", "d", "é", "\uff21", "\U0001d538", "")[number % 6] + str(number)


def qrels():
    """Grades from -1 to 3, by query and document."""
    judged = {}
    for query in range(NUM_QUERIES):
        docs = [number for number in range(NUM_DOCS + 5) if mixed(1, query, number) % 3 == 0]
        judged[f"q{query}"] = {doc_id(number): mixed(2, query, number) % 5 - 1 for number in docs}
    return judged


SCORES = {
    "no_ties": lambda query, number: f"{mixed(3, query, number) / 2**32:.9f}",
    "ties": lambda query, number: str(mixed(3, query, number) % 4),
    "all_equal": lambda query, number: "1.0",
    "equal_in_float32": lambda query, number: f"{12.5 + mixed(3, query, number) % 50 * 1e-8:.9f}",
    "notations": lambda query, number: ("1e-3", "-2.5E+1", "+3", ".5", "7.", "0", "-0.0", "1E-46")[mixed(3, query, number) % 8],
    "large": lambda query, number: str((mixed(3, query, number) % 9 - 4) * 10**37),
}


def lines(name):
    """(query, Q0, document, rank, score, tag) of each line, in an order and with ranks that contradict the scores."""
    found = []
    for query in range(NUM_QUERIES):
        for number in sorted(range(NUM_DOCS), key=lambda number: mixed(4, query, number)):
            rank = 1 + mixed(5, query, number) % 100
            found.append((f"q{query}", "Q0", doc_id(number), str(rank), SCORES[name](query, number), "foreign"))
    return sorted(found, key=lambda line: mixed(6, len(line[2]), int(line[3])))


def run_text(name, blank=" ", end="\n"):
    return "".join(blank.join(line) + end for line in lines(name))


def qrels_text(blank=" ", end="\n"):
    return "".join(
        blank.join((query, "0", doc, str(grade))) + end for query, docs in qrels().items() for doc, grade in docs.items()
    )


def by_pytrec_eval(name, missing=()):
    """The means over all judged queries, 0 for a query that the run misses."""
    import pytrec_eval

    run = pytrec_eval.parse_run([line for line in run_text(name).splitlines(True) if line.split()[0] not in missing])
    judged = pytrec_eval.parse_qrel(qrels_text().splitlines(True))
    found = pytrec_eval.RelevanceEvaluator(judged, set(MEASURES.values())).evaluate(run)
    return {
        ours: round(math.fsum(values[theirs] for values in found.values()) / len(judged), 9) for ours, theirs in MEASURES.items()
    }


if __name__ == "__main__":
    print(json.dumps({name: by_pytrec_eval(name) for name in SCORES} | {"missing": by_pytrec_eval("ties", ("q3", "q7"))}, indent=1))
