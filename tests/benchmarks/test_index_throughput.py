import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_one_json_line_a_size_with_every_index():
    flags = ["--num_docs", "1000", "500", "--num_queries", "32", "--dim", "64", "--repeats", "1"]
    command = [sys.executable, "-m", "benchmarks.index_throughput", *flags]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    reports = [json.loads(line) for line in lines]
    assert [report["num_docs"] for report in reports] == [1000, 500]
    for report in reports:
        assert report["exact"]["bytes"] == report["num_docs"] * 64 * 4
        assert report["flat"]["recall@10"] == 1
        for index in ("exact", "flat", "ivf", "hnsw"):
            assert report[index]["recall@10"] > 0.5
            assert report[index]["queries_per_second"] > 0
            assert report[index]["bytes"] >= report["exact"]["bytes"]
