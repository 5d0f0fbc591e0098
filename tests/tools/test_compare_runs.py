import numpy as np
import pytest
from scipy import stats

from de_jax import cli
from de_jax.evaluation import metrics
from de_jax.types import InputError

QUERIES = [f"q{number}" for number in range(40)]
QRELS = {query_id: {"relevant": 1, "judged": 0} for query_id in QUERIES}


@pytest.fixture
def files(tmp_path):
    """Judgements, and runs that put the relevant document at ranks drawn with more or less luck."""
    rows = [f"{query_id}\t{doc_id}\t{grade}" for query_id, docs in QRELS.items() for doc_id, grade in docs.items()]
    (tmp_path / "qrels.tsv").write_text("\n".join(rows) + "\n")
    rng = np.random.default_rng(0)
    for name, luck in (("base", 8), ("good", 2), ("seed0", 5), ("seed1", 5), ("seed2", 5)):
        results = {}
        for query_id in QUERIES:
            ids = [f"other{number}" for number in range(10)]
            ids.insert(int(rng.integers(0, luck + 1)), "relevant")
            results[query_id] = {doc_id: float(-rank) for rank, doc_id in enumerate(ids)}
        metrics.write_trec_run(tmp_path / f"{name}.trec", results)
    return tmp_path


def per_query(files, name, measure="nDCG@10"):
    scored = metrics.score_results(metrics.read_trec_run(files / f"{name}.trec"), QRELS, measures=[measure])
    return np.array([value for values in scored.values() for value in values.values()])


def test_systems_are_tested_against_the_first(files, printed):
    seeds = ",".join(str(files / f"seed{seed}.trec") for seed in range(3))
    systems = [f"base={files / 'base.trec'}", f"good={files / 'good.trec'}", f"trained={seeds}"]
    report = printed("compare runs", qrels=files / "qrels.tsv", systems=systems, out_png=files / "gains.png")
    assert (report["measure"], report["num_queries"], report["baseline"]) == ("ndcg@10", 40, "base")
    base, good = per_query(files, "base"), per_query(files, "good")
    trained = np.stack([per_query(files, f"seed{seed}") for seed in range(3)])
    found = report["systems"]
    assert found["good"]["difference"] == pytest.approx(np.mean(good - base), abs=1e-6)
    assert found["good"]["p_t_test"] == pytest.approx(stats.ttest_rel(good, base).pvalue, abs=1e-9)
    assert [found["good"][name] for name in ("wins", "ties", "losses")] == [
        int(np.sum(np.sign(good - base) == sign)) for sign in (1, 0, -1)
    ]
    assert found["trained"]["p_t_test"] == pytest.approx(stats.ttest_rel(trained.mean(axis=0), base).pvalue, abs=1e-9)
    assert found["trained"]["mean"] == pytest.approx(trained.mean(), abs=1e-6)
    assert found["trained"]["std"] == pytest.approx(np.std(trained.mean(axis=1), ddof=1), abs=1e-6)
    assert (found["trained"]["num_seeds"], found["base"]["num_seeds"]) == (3, 1)
    weaker = max(found["good"]["p_t_test"], found["trained"]["p_t_test"])
    assert max(found["good"]["holm_t_test"], found["trained"]["holm_t_test"]) >= weaker
    assert "p_t_test" not in found["base"]
    assert (found["base"]["overlap@10"], found["base"]["hole@10"]) == (1, pytest.approx(0.9))
    assert (files / "gains.png").stat().st_size > 1000


def test_a_kept_evaluation_stands_for_its_dense_run(files, printed):
    (files / "kept").mkdir()
    (files / "good.trec").rename(files / "kept" / "dense.trec")
    systems = [f"base={files / 'base.trec'}", f"good={files / 'kept'}"]
    report = printed("compare runs", qrels=files / "qrels.tsv", systems=systems, measure="RR@10", k=3)
    assert report["systems"]["good"]["wins"] > report["systems"]["good"]["losses"]
    assert report["measure"] == "mrr@10"
    assert "overlap@3" in report["systems"]["good"]


def test_the_table_has_a_row_a_system(files, capsys):
    systems = [f"base={files / 'base.trec'}", f"good={files / 'good.trec'}"]
    cli.call("compare runs", [f"--qrels={files / 'qrels.tsv'}", "--systems", *systems])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["ndcg@10", "base", "good"]


def test_bad_input_is_refused(files):
    base = f"base={files / 'base.trec'}"

    def fault(*systems, qrels=files / "qrels.tsv", more=()):
        with pytest.raises(InputError) as error:
            cli.call("compare runs", [f"--qrels={qrels}", "--systems", *systems, *more])
        return str(error.value)

    def file(name, text):
        (files / name).write_text(text)
        return files / name

    assert "--systems has one system" in fault(base)
    assert "--systems has 'good.trec'; give each name once" in fault(base, "good.trec")
    assert "give each name once" in fault(base, base)
    assert "absent.trec does not exist" in fault(base, f"x={files / 'absent.trec'}")
    assert "broken.trec, line 1: 3 columns" in fault(base, f"x={file('broken.trec', 'q0 Q0 d0')}")
    assert "empty.trec holds no result" in fault(base, f"x={file('empty.trec', '')}")
    assert "no judged query has results" in fault(base, f"x={file('other.trec', 'z Q0 d0 1 1.0 x')}")
    assert "absent.tsv does not exist" in fault(base, f"x={files / 'good.trec'}", qrels=files / "absent.tsv")
    assert "measure 'nope' is unknown" in fault(base, f"x={files / 'good.trec'}", more=["--measure=nope"])
    assert "k is 0" in fault(base, f"x={files / 'good.trec'}", more=["--k=0"])
    assert "1 query is too few" in fault(base, f"x={files / 'good.trec'}", qrels=file("one.tsv", "q0\trelevant\t1\n"))
