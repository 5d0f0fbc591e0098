"""The costs of generations of negatives, from records made by hand."""

import json

from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_pairs import Mined
from reproduction import mining_costs

PAIRS = (("qa", "d0"), ("qa", "d1"), ("qb", "d2"), ("qc", "d4"))


def generation(folder, seconds):
    return generations.write_lines(folder, 1, [Mined(query, doc, ["d9"], []) for query, doc in PAIRS], {"seconds": seconds})


def test_costs_are_those_of_one_document_one_query_and_one_batch(tmp_path, capsys):
    seconds = {"encode": 6.0, "encode_queries": 0.3, "index": 0.5, "search": 0.6, "choose": 0.4}
    kinds = {"bm25": generation(tmp_path / "bm25", {"index": 2.0}), "ance": generation(tmp_path / "ance", seconds)}
    (tmp_path / "recipe.json").write_text('{"data": {"function": "beir_pairs", "options": {"batch_size": 8}}}')
    lines = [{"step": step, "pairs_per_second": speed} for step, speed in enumerate((1.0, 16.0, 17.0, 16.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 4, "dev/ndcg@10": 0.5}]))
    costs = mining_costs.of_run(tmp_path, kinds, num_docs=30)
    assert costs.training == {"batch_size": 8, "step_ms": 500.0}
    assert costs.generations["bm25"] == {"index_seconds": 2.0, "refresh_seconds": 2.0}
    assert costs.generations["ance"] == {
        "docs_per_second": 5.0,
        "ms_per_doc": 200.0,
        "query_encoding_ms": 100.0,  # 3 queries
        "index_seconds": 0.5,
        "search_ms": 200.0,
        "negatives_ms_per_batch": 2000.0,  # 1 second for 4 pairs
        "refresh_seconds": 7.8,
    }
    folders = [f"bm25={tmp_path / 'bm25'}", f"ance={tmp_path / 'ance'}"]
    mining_costs.main([str(tmp_path), "--num_docs=30", "--negatives", *folders])
    table = capsys.readouterr().out.splitlines()
    assert table[:2] == ["| operation | bm25 | ance |", "| --- | ---: | ---: |"]
    assert "| index, seconds | 2 | 0.5 |" in table
    assert "| encoding, ms a document |  | 200 |" in table
    assert table[-1] == "| training step, ms a batch | 500 | 500 |"


def test_a_run_from_elsewhere_has_no_costs_of_training(tmp_path):
    assert mining_costs.of_run(tmp_path, {}, num_docs=3) == mining_costs.Costs({}, {})
