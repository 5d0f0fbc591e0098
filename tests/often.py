"""Some tests, and some cases of a test, run each time; CI and the soak run the others too."""

from collections.abc import Iterable

import pytest

ONLY_IN_CI = (
    *("tests/benchmarks/test_gpu.py", "tests/data/test_seqio_batches.py", "tests/golden/", "tests/interop/test_generators.py"),
    *("tests/models/test_attention_gpu.py", "tests/models/test_attention_tpu.py", "tests/models/test_decoding.py"),
    *("tests/models/test_generator.py", "tests/models/test_onnx_graph.py", "tests/reports/test_plots.py", "tests/reproduction/"),
    *("tests/test_journeys.py", "tests/test_lighten.py", "tests/tools/test_doc2query.py"),
)
"""Long for what they cover, an eighth of the files with a third of the time: left out of `pytest`, part of CI's short soak."""


def often(cases: Iterable, *chosen) -> list:
    """The parameters of a test: the chosen cases, the others marked for the soak; each chosen one must be a case."""
    cases = list(cases)
    assert {*chosen} <= {*cases}
    return [case if case in chosen else _in_the_soak(case) for case in cases]


def _in_the_soak(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
