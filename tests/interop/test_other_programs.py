"""Programs that open an export as it is, as the pages say: Transformers.js under node, fastembed, OpenVINO, sentence-transformers
with onnxruntime, Qdrant, DuckDB and LanceDB.

pip install -e '.[openvino]' fastembed qdrant-client duckdb lancedb sentence-transformers==6.2.0; node and npm on the path
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from interop.test_export import TEXTS, embeddings, make_run, vocabularies  # noqa: F401

import de_jax
from de_jax.interop import export
from de_jax.retrieval.index import ExactIndex

pytestmark = pytest.mark.soak
DOCS = Path(__file__).resolve().parents[2] / "docs"
DTYPES = {"fp32": 1e-5, "fp16": 0.02, "q8": 0.2}
"""Of Transformers.js, and how far embeddings may be from ours."""
OLDER = ("sentence-transformers==5.7.0", "transformers==4.57.6", "huggingface_hub==0.36.0", "tokenizers==0.22.1")
OLDER += ("optimum==2.1.0", "optimum-onnx==0.1.0", "datasets==4.4.1")
"""sentence-transformers 6 has no release of optimum-onnx to go with; torch is the one of this environment."""
ENCODE = """
import sys, json, sentence_transformers as library
model = library.SentenceTransformer("exported", backend="onnx", device="cpu", model_kwargs={"file_name": sys.argv[1]})
print(library.__version__, json.dumps(model.encode(json.loads(sys.stdin.read())).tolist()))
"""


def block(page, language, words):
    """The code of a page that has these words."""
    found = re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = (one for one in found if words in one)
    return code


@pytest.fixture(params=["bert", "roberta"])
def expected(request, tmp_path, vocabularies, monkeypatch):  # noqa: F811
    """Our embeddings of `TEXTS`, with the model in the folder "exported"."""
    run = make_run(tmp_path, vocabularies, request.param)
    export.export(run, tmp_path / "exported", "onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return embeddings(run, "doc", tmp_path)


def assert_near(found, expected, atol=1e-5):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found) / scale, expected / scale, atol=atol)


def output_of(*command, **options):
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, **options).stdout


@pytest.fixture(scope="module")
def node_modules(tmp_path_factory):
    """The scripts of onnxruntime-node would fetch CUDA."""
    folder = tmp_path_factory.mktemp("node")
    output_of("npm", "install", "--ignore-scripts", "--no-audit", "@huggingface/transformers@4", cwd=folder)
    return folder / "node_modules"


def test_transformers_js_opens_the_three_files(expected, tmp_path, node_modules):
    (tmp_path / "node_modules").symlink_to(node_modules)
    code = block("guides/serve.md", "javascript", "@huggingface/transformers").partition("const embeddings")[0]
    code += f"console.log(JSON.stringify((await embed({json.dumps(TEXTS)})).tolist()))"
    lengths = np.array([len(one.ids) for one in tokenizers.Tokenizer.from_file("exported/tokenizer.json").encode_batch(TEXTS)])
    fits = lengths <= 40  # a longer text loses its last special token there, as the page says
    assert 2 < fits.sum() < len(TEXTS)
    for dtype, atol in DTYPES.items():
        (tmp_path / "serve.mjs").write_text(code.replace("'q8'", f"'{dtype}'"))
        assert_near(np.array(json.loads(output_of("node", "serve.mjs")))[fits], expected[fits], atol)


def test_the_python_of_the_page_gives_our_embeddings(expected):
    variables = {}
    exec(block("guides/serve.md", "python", "import onnxruntime"), variables)
    assert_near(variables["embed"](TEXTS), expected)


def test_fastembed_opens_the_folder(expected, request):
    code = block("guides/serve.md", "python", "fastembed").replace("dim=384", "dim=12")
    variables = {}
    exec(code.replace("my-retriever", request.node.callspec.id), variables)
    assert_near(list(variables["model"].embed(TEXTS)), expected)


def test_openvino_opens_the_file_and_is_a_backend(expected):
    import openvino

    assert openvino.Core().read_model("exported/onnx/model.onnx").output(0).any_name == "sentence_embedding"
    assert_near(de_jax.load("exported", dtype="float32", backend="openvino").encode_document(TEXTS), expected)


def test_sentence_transformers_encodes_by_onnxruntime(expected, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "sentence_transformers"
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}", *OLDER]
        subprocess.run(pip, check=True, env={**os.environ, "HF_HUB_OFFLINE": ""})
    for file, atol in (("onnx/model.onnx", 1e-5), ("onnx/model_quantized.onnx", DTYPES["q8"])):
        environment = {**os.environ, "PYTHONPATH": str(folder), "USE_TF": "0"}  # it is too old for TensorFlow's Keras 3
        found = output_of(sys.executable, "-c", ENCODE, file, input=json.dumps(TEXTS), env=environment)
        version, _, rows = found.partition(" ")
        assert version == "5.7.0"
        assert_near(json.loads(rows), expected, atol)


def test_other_engines_rank_as_the_exact_index_does(tmp_path, monkeypatch):
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    vectors = np.random.default_rng(0).normal(size=(501, 16)).astype(np.float32)
    ids = [f"d{row * 7919 % 500}" for row in range(500)]
    columns = {"id": ids, "text": ids, "embedding": vectors[:500].tolist()}
    types = pyarrow.schema(
        {"id": pyarrow.string(), "text": pyarrow.string(), "embedding": pyarrow.list_(pyarrow.float32(), 16)}.items()
    )
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=types), "scifact.parquet")

    class Model:
        def encode_query(self, text):
            return vectors[500]

    code = block("retrieval.md", "python", "qdrant_client")
    variables = {"model": Model()}
    exec(code.replace("hits = lance", "of_lance = lance"), variables)
    best = [ids[row] for row in ExactIndex(vectors[:500], ids).search(vectors[500:], 10).doc_rows[0]]
    assert variables["hits"] == best
    assert [row[0] for row in variables["rows"]] == best
    assert [row["id"] for row in variables["of_lance"]] == best
