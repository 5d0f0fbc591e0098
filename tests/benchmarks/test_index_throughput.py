import pytest


@pytest.mark.soak
def test_one_json_line_a_size_with_every_index(printed):
    sizes = ["--num_docs", 1000, 500, "--num_queries", 32, "--dim", 64, "--repeats", 1]
    reports = printed("index_throughput", *sizes)
    assert [report["num_docs"] for report in reports] == [1000, 500]
    for report in reports:
        assert report["exact"]["bytes"] == report["num_docs"] * 64 * 4
        assert report["flat"]["recall@10"] == 1
        assert report["numpy"]["recall@10"] == 1
        for index in ("exact", "numpy", "flat", "ivf", "hnsw"):
            assert report[index]["recall@10"] > 0.5
            assert report[index]["queries_per_second"] > 0
            assert report[index]["queries_per_second_one_by_one"] > 0
            assert report[index]["peak_mib"] >= 0
            assert report[index]["bytes"] >= report["exact"]["bytes"]
