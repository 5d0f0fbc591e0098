"""A disk that fills up while another library writes is one error of the system, with the name of the output."""

import errno

import numpy as np
import pytest

from de_jax.files import outputs
from de_jax.files.folders import atomic_dir
from de_jax.interop import pretrained, t5x
from de_jax.retrieval import faiss_filling, sessions

ARRAY = np.random.default_rng(0).normal(size=(200, 200)).astype(np.float32)  # 160 kB that no library can compress
WORDS = {f"word{number}": number for number in range(9000)}


def with_tokenizers(folder):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="word0")).save(str(folder / "tokenizer.json"))


def with_arrow(folder):
    pytest.importorskip("pyarrow.parquet")
    import pyarrow as arrow

    with arrow.parquet.ParquetWriter(folder / "table.parquet", arrow.schema({"x": arrow.float32()})) as writer:
        writer.write_table(arrow.table({"x": ARRAY.reshape(-1)}))


def with_faiss(folder):
    index = pytest.importorskip("faiss").IndexFlatIP(200)
    index.add(ARRAY)
    faiss_filling.write_index(index, folder / "index.faiss")


def with_onnx(folder):
    onnx = pytest.importorskip("onnx")
    graph = onnx.helper.make_graph([], "graph", [], [], [onnx.numpy_helper.from_array(ARRAY, "x")])
    sessions.save(onnx.helper.make_model(graph), folder / "model.onnx")


WRITERS = {
    "safetensors": lambda folder: pretrained.save(folder / "model.safetensors", {"x": ARRAY}),
    "tokenizers": with_tokenizers,
    "tensorstore": lambda folder: t5x.write_arrays(folder, {"x": ARRAY}, 1),
    "arrow": with_arrow,
    "faiss": with_faiss,
    "onnx": with_onnx,
    "npy": lambda folder: outputs.save_array(folder / "x.npy", ARRAY),
    "npz": lambda folder: np.savez(folder / "x.npz", x=ARRAY),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_is_the_systems_error_with_the_name_of_the_output(small_disk, write):
    out = small_disk.folder / "out"
    small_disk.leave(20000)
    with pytest.raises(OSError, match=r"No space left on device|File too large") as caught, atomic_dir(out) as folder:
        write(folder)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert caught.value.filename == str(out)
    assert small_disk.files() == {}
    small_disk.free()
    with atomic_dir(out) as folder:
        write(folder)
    assert small_disk.files()
