import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import faiss
import numpy as np
import pytest

from de_jax.files import folders
from de_jax.mining.miner import Miner
from de_jax.retrieval import faiss_filling, faiss_index
from de_jax.retrieval.faiss_index import FaissIndex, index_builder
from de_jax.retrieval.index import ExactIndex
from de_jax.retrieval.index_settings import IndexSettings
from de_jax.types import InputError


def small_integers(rng, num_rows, dim=4):
    """Vectors whose inner products are exact and often equal."""
    return rng.integers(-2, 3, (num_rows, dim)).astype(np.float32)


def clustered(rng, num_docs, num_queries, dim=32):
    """Unit vectors: documents in groups of about 20, and queries near some of them."""
    centres = rng.standard_normal((num_docs // 20, dim), np.float32)
    docs = centres[rng.integers(0, len(centres), num_docs)] + 0.3 * rng.standard_normal((num_docs, dim), np.float32)
    queries = docs[rng.integers(0, num_docs, num_queries)] + 0.3 * rng.standard_normal((num_queries, dim), np.float32)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (docs, queries))


def names(num_docs):
    return [f"d{i}" for i in range(num_docs)]


def assert_same_ranking(found, expected, atol=0.0):
    np.testing.assert_array_equal(found.doc_rows, expected.doc_rows)
    np.testing.assert_allclose(found.scores, expected.scores, atol=atol, rtol=0)
    assert (found.doc_rows.dtype, found.scores.dtype) == (np.int32, np.float32)


@pytest.fixture(scope="module")
def corpus():
    """(documents, ids, queries), with duplicates among the documents."""
    rng = np.random.default_rng(0)
    docs, queries = clustered(rng, 600, 40)
    docs = docs[rng.integers(0, 600, 2000)]
    return docs, [str(i) for i in rng.permutation(2000)], queries


@pytest.mark.parametrize(("num_docs", "k"), [(1, 1), (7, 3), (7, 20), (900, 1), (900, 100), (900, 899)])
def test_flat_equals_the_exact_index_with_many_ties(num_docs, k):
    rng = np.random.default_rng(num_docs)
    docs, queries = small_integers(rng, num_docs), small_integers(rng, 30)
    ids = [str(i) for i in rng.permutation(num_docs)]
    expected = ExactIndex(docs, ids).search(queries, k)
    index = FaissIndex.build(docs, ids)
    assert_same_ranking(index.search(queries, k), expected)
    alone = index.search(queries[3:4], k)
    np.testing.assert_array_equal(alone.doc_rows, expected.doc_rows[3:4])


@pytest.mark.parametrize("k", [1, 10, 150])
def test_flat_equals_the_exact_index_on_real_vectors_with_duplicates(corpus, k):
    docs, ids, queries = corpus
    assert_same_ranking(FaissIndex.build(docs, ids).search(queries, k), ExactIndex(docs, ids).search(queries, k), atol=1e-6)


def test_a_corpus_of_equal_documents_is_ranked_by_id_downwards(monkeypatch):
    monkeypatch.setattr(faiss_index, "RESULT_ENTRIES", 500)
    docs, ids = np.ones((300, 4), np.float32), [str(i) for i in range(300)]
    found = FaissIndex.build(docs, ids).search(docs[:9], 5)
    assert found.doc_rows.tolist() == [[int(doc_id) for doc_id in sorted(ids, reverse=True)[:5]]] * 9


def test_all_lists_of_ivf_give_what_flat_gives(corpus):
    docs, ids, queries = corpus
    index = FaissIndex.build(docs, ids, factory="IVF16,Flat", options=IndexSettings(nprobe=16))
    assert_same_ranking(index.search(queries, 20), FaissIndex.build(docs, ids).search(queries, 20), atol=1e-6)


def test_one_list_of_ivf_may_hold_fewer_documents_than_asked(corpus):
    docs, ids, queries = corpus
    found = FaissIndex.build(docs, ids, factory="IVF16,Flat", options=IndexSettings(nprobe=1)).search(queries, 1900)
    assert ((found.doc_rows == -1) == (found.scores == -np.inf)).all()
    assert (found.doc_rows[:, 0] >= 0).all()
    assert (found.doc_rows[:, -1] == -1).all()
    assert all(len(set(rows[rows >= 0])) == (rows >= 0).sum() for rows in found.doc_rows)


def test_hnsw_finds_most_of_the_ten_best():
    docs, queries = clustered(np.random.default_rng(1), 2000, 100)
    expected = ExactIndex(docs, names(2000)).search(queries, 10).doc_rows
    found = FaissIndex.build(docs, names(2000), factory="HNSW16", options=IndexSettings(ef_search=64)).search(queries, 10)
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.doc_rows, expected, strict=True)])
    assert recall > 0.9
    np.testing.assert_allclose(found.scores[:, 0], (queries * docs[found.doc_rows[:, 0]]).sum(axis=1), atol=1e-5)


def test_the_training_sample_follows_the_seed(corpus):
    docs, ids, queries = corpus

    def build(seed):
        return FaissIndex.build(docs, ids, factory="IVF16,Flat", train_size=700, seed=seed).search(queries, 50)

    assert_same_ranking(build(0), build(0))
    assert (build(0).doc_rows != build(1).doc_rows).any()


class Corpus:
    """Counts the rows that are read at a time."""

    def __init__(self, embeddings):
        self.embeddings, self.shape, self.reads = embeddings, embeddings.shape, []
        self.dtype = embeddings.dtype

    def __len__(self):
        return len(self.embeddings)

    def __getitem__(self, rows):
        self.reads.append(len(rows))
        return self.embeddings[rows]


def test_a_memory_mapped_corpus_is_added_part_by_part(corpus, tmp_path, monkeypatch):
    docs, ids, queries = corpus
    np.save(tmp_path / "docs.npy", docs)
    monkeypatch.setattr(faiss_filling, "ADD_DOCS", 300)
    mapped = Corpus(np.load(tmp_path / "docs.npy", mmap_mode="r"))
    index = FaissIndex.build(mapped, ids, factory="IVF8,Flat", train_size=400, options=IndexSettings(nprobe=8))
    assert mapped.reads == [400, *[300] * 6, 200]
    assert_same_ranking(index.search(queries, 10), ExactIndex(docs, ids).search(queries, 10), atol=1e-6)


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "HNSW8", "IVF16,SQ8"])
def test_a_saved_index_gives_the_same_ranking(corpus, tmp_path, factory):
    docs, ids, queries = corpus
    options = IndexSettings(nprobe=4) if "IVF" in factory else IndexSettings()
    index = FaissIndex.build(docs, ids, factory=factory, options=options)
    index.save(tmp_path / "index")
    expected = index.search(queries, 10)
    loaded = FaissIndex.load(tmp_path / "index")
    assert_same_ranking(loaded.search(queries, 10), expected)
    loaded.save(tmp_path / "index")
    assert_same_ranking(loaded.search(queries, 10), expected)
    assert_same_ranking(FaissIndex.load(tmp_path / "index").search(queries, 10), expected)


def test_the_manifest_says_what_the_folder_holds(tmp_path):
    FaissIndex.build(np.eye(3, dtype=np.float32), list("abc"), factory="HNSW4").save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert {name: manifest[name] for name in ("factory", "num_docs", "dim")} == {"factory": "HNSW4", "num_docs": 3, "dim": 3}


def test_a_failed_save_leaves_the_older_index(tmp_path, monkeypatch):
    index = FaissIndex.build(np.eye(3, dtype=np.float32), list("abc"))
    index.save(tmp_path / "index")

    def write(file_index, writer):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(faiss, "write_index", write)
    with pytest.raises(OSError, match="No space left"):
        index.save(tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert FaissIndex.load(tmp_path / "index").search(np.eye(3, dtype=np.float32), 1).doc_rows[:, 0].tolist() == [0, 1, 2]


def test_a_full_disk_is_noticed():
    """FAISS's own writer closes such a file without a word."""
    with pytest.raises(OSError, match="No space left"):
        faiss_filling.write_index(faiss.IndexFlatIP(3), Path("/dev/full"))


def damage(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    index_file = folder / "index.faiss"
    if change == "no manifest":
        (folder / "manifest.json").unlink()
    elif change == "format":
        (folder / "manifest.json").write_text(json.dumps({**manifest, "format": "something 2"}))
    elif change == "short":
        index_file.write_bytes(index_file.read_bytes()[:-7])
    elif change == "no ids":
        (folder / "ids.json").unlink()
    elif change == "bit":
        content = bytearray(index_file.read_bytes())
        content[-1] ^= 1
        index_file.write_bytes(content)
    elif change == "ids":
        text = (folder / "ids.json").read_text()
        (folder / "ids.json").write_text(text.replace("a", "z"))
    elif change == "counts":
        (folder / "checksums.json").unlink()
        (folder / "manifest.json").write_text(json.dumps({**manifest, "num_docs": 4}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no manifest", r"holds no complete faiss index \(no manifest.json\)"),
        ("format", "format is 'something 2', expected 'de_jax faiss index 1'"),
        ("short", "index.faiss is missing or not"),
        ("no ids", "ids.json is missing"),
        ("bit", r"index\.faiss has another SHA-256"),
        ("ids", r"ids\.json has another SHA-256"),
        ("counts", r"holds \(ids, vectors, dimensions\) \(3, 3, 3\), not \(4, 4, 3\)"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, monkeypatch, change, message):
    monkeypatch.setattr(folders, "SMALL_BYTES", 0)
    FaissIndex.build(np.eye(3, dtype=np.float32), list("abc")).save(tmp_path)
    damage(tmp_path, change)
    with pytest.raises(InputError, match=message) as caught:
        FaissIndex.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_other_files_are_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    index = FaissIndex.build(np.eye(3, dtype=np.float32), list("abc"))
    for place in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(InputError, match=r"holds thesis\.tex, which is not part of a former faiss index|is a file"):
            index.save(place)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("nonsense", {}, r"cannot make an index 'nonsense' of 3 dimensions \(could not parse index string nonsense\)"),
        ("PQ2", {}, "'PQ2' of 3 dimensions .The dimension of the vector .d. should be a multiple"),
        ("LSH", {}, "cannot make an index 'LSH'"),
        ("IVF64,Flat", {}, "cannot be trained on 4 documents .Number of training points .4. should be .*choose fewer lists"),
        ("IDMap,Flat", {}, "'IDMap,Flat' cannot be filled part by part"),
        ("Flat", {"nprobe": 4}, "nprobe does not apply to 'Flat'"),
        ("IVF2,Flat", {"ef_search": 4}, "efSearch does not apply to 'IVF2,Flat'"),
        ("IVF2,Flat", {"nprobe": 0}, "nprobe is 0"),
        ("Flat", {"faiss_device": "tpu"}, "faiss_device is 'tpu'"),
        ("Flat", {"faiss_device": "gpu", "faiss_gpu_mode": "split"}, "faiss_gpu_mode is 'split'"),
        ("Flat", {"faiss_device": "all_gpus"}, "FAISS sees no GPU"),
        ("Flat", {"faiss_float16": True}, "float16 is for GPUs"),
    ],
)
@pytest.mark.usefixtures("as_users_have_it")
def test_what_faiss_cannot_do_is_said_in_one_sentence(factory, options, message):
    with pytest.raises(InputError, match=message) as caught:
        FaissIndex.build(np.eye(4, 3, dtype=np.float32), list("abcd"), factory=factory, options=IndexSettings(**options))
    assert ".cpp" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_sizes_and_values_are_refused():
    eye = np.eye(3, dtype=np.float32)
    with pytest.raises(InputError, match="no documents"):
        FaissIndex.build(np.zeros((0, 3), np.float32), [])
    with pytest.raises(InputError, match="2 document ids do not match 3 embeddings"):
        FaissIndex.build(eye, ["a", "b"])
    with pytest.raises(InputError, match="train_size is 0"):
        FaissIndex.build(eye, list("abc"), train_size=0)
    index = FaissIndex.build(eye, list("abc"))
    with pytest.raises(InputError, match="k is 0"):
        index.search(eye, 0)
    with pytest.raises(InputError, match="queries have 2 dimensions and documents 3"):
        index.search(np.zeros((1, 2), np.float32), 1)
    broken = eye.copy()
    broken[2, 1] = np.nan
    with pytest.raises(InputError, match="document 'c' has a value that is not finite"):
        FaissIndex.build(broken, list("abc"))
    with pytest.raises(InputError, match="query 2 has a value that is not finite"):
        index.search(broken, 1)


def test_no_queries_give_an_empty_ranking():
    found = FaissIndex.build(np.eye(2, dtype=np.float32), ["a", "b"]).search(np.zeros((0, 2), np.float32), 3)
    assert found.doc_rows.shape == found.scores.shape == (0, 3)


def test_a_machine_without_faiss_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "faiss", None)
    sentence = r"FAISS cannot be imported .*pip install 'de-jax-retrieval\[cpu\]', or 'de-jax-retrieval\[gpu\]'"
    with pytest.raises(InputError, match=sentence):
        FaissIndex.build(np.eye(3, dtype=np.float32), list("abc"))
    with pytest.raises(InputError, match=sentence):
        FaissIndex.load(tmp_path)
    with pytest.raises(InputError, match=sentence):
        index_builder(IndexSettings("Flat"))
    assert isinstance(index_builder(IndexSettings("exact"))(np.eye(3, dtype=np.float32), list("abc")), ExactIndex)


@pytest.fixture
def two_gpus(monkeypatch):
    """A FAISS that sees two GPUs; records what it is asked to put there and searches on the CPU."""
    copies = []

    def copy(index, cloner, gpus):
        if "HNSW" in type(index).__name__:
            raise RuntimeError("Error in f() at /x/GpuCloner.cpp:1: This index type is not implemented on GPU.")
        copies.append((index.ntotal, cloner.shard, cloner.useFloat16, gpus))
        return faiss.clone_index(index)

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", types.SimpleNamespace, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpus_list", copy)
    monkeypatch.setattr(faiss, "index_gpu_to_cpu", faiss.clone_index, raising=False)
    return copies


def test_a_miner_is_told_what_no_gpu_does_before_anything_is_encoded(two_gpus):
    Miner(index="Flat", faiss_device="gpu").check()
    with pytest.raises(InputError, match="FAISS cannot put the index on a GPU"):
        Miner(index="HNSW32", faiss_device="gpu").check()
    with pytest.raises(InputError, match=r"Miner\.last_rank is 3000, and FAISS on a GPU finds at most 2048; lower it"):
        Miner(index="Flat", faiss_device="gpu", last_rank=3000).check()


def test_gpus_hold_the_filled_index_as_asked(two_gpus, monkeypatch):
    monkeypatch.setattr(faiss_index, "GPU_DEPTH", 50)
    docs, ids = small_integers(np.random.default_rng(0), 90), names(90)
    index = FaissIndex.build(
        docs, ids, options=IndexSettings(faiss_device="all_gpus", faiss_gpu_mode="replicate", faiss_float16=True)
    )
    assert two_gpus == [(0, False, True, [0]), (90, False, True, None)]
    assert (index.search(docs, 40).doc_rows >= 0).all()
    with pytest.raises(InputError, match="k is 60; a GPU gives at most 50"):
        index.search(docs, 60)
    FaissIndex.build(docs, ids, options=IndexSettings(faiss_device="gpu"))
    assert two_gpus[-1] == (90, True, False, [0])


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_gpu_trains_and_fills_an_inverted_index_part_by_part(two_gpus, corpus, tmp_path, monkeypatch, on_disk):
    docs, ids, queries = corpus
    monkeypatch.setattr(faiss_filling, "ADD_DOCS", 300)
    monkeypatch.setattr(faiss_filling, "PART_BYTES", 1)
    cpu = FaissIndex.build(docs, ids, factory="IVF8,Flat", options=IndexSettings(nprobe=4))
    with monkeypatch.context() as patched:  # none of it on the CPU
        patched.setattr(faiss_filling, "on_gpus", lambda index: two_gpus.append("to fill") or faiss.clone_index(index))
        options = IndexSettings(nprobe=4, faiss_device="all_gpus", faiss_float16=True, faiss_on_disk=on_disk)
        found = index_builder(dataclasses.replace(options, index="IVF8,Flat"))(docs, ids, tmp_path).search(queries, 20)
    assert_same_ranking(found, cpu.search(queries, 20))
    filled = ["to fill"] if on_disk else [(0, True, True, [0])] * 2 + ["to fill", (2000, True, True, None)]
    assert two_gpus == filled


def test_an_index_that_no_gpu_holds_is_refused_before_it_is_built(two_gpus):
    with pytest.raises(InputError, match=r"cannot put the index on a GPU \(This index type is not implemented on GPU\)"):
        FaissIndex.build(np.eye(3, dtype=np.float32), list("abc"), factory="HNSW4", options=IndexSettings(faiss_device="gpu"))
    assert two_gpus == []


@pytest.mark.parametrize(
    ("choice", "options", "message"),
    [
        ("nonsense", {}, "could not parse index string nonsense"),
        ("HNSW32", {"nprobe": 4}, "nprobe does not apply to 'HNSW32'"),
        ("Flat", {"faiss_device": "gpu"}, "FAISS sees no GPU"),
        ("exact", {"nprobe": 4}, "the exact index takes no nprobe"),
        ("exact", {"faiss_on_disk": True}, "device or place on disk"),
        ("HNSW8", {"faiss_on_disk": True}, "'HNSW8' cannot stay on disk; choose an inverted index"),
        ("Flat", {"faiss_on_disk": True}, "'Flat' cannot stay on disk"),
        ("IVF4,PQ8x4fs", {"faiss_on_disk": True}, "cannot stay on disk"),
        ("IVF4,PQ8,RFlat", {"faiss_on_disk": True}, "cannot stay on disk"),
    ],
)
def test_a_choice_is_checked_before_there_are_embeddings(choice, options, message):
    with pytest.raises(InputError, match=message):
        index_builder(IndexSettings(choice, **options))


def test_a_choice_that_depends_on_the_dimensions_is_left_to_building():
    docs = small_integers(np.random.default_rng(0), 300, dim=10)
    build = index_builder(IndexSettings("PQ5x4"))
    assert (build(docs, names(300)).search(docs[:2], 3).doc_rows >= 0).all()


def test_an_index_is_built_once_a_folder_and_factory(tmp_path, monkeypatch, recwarn):
    docs, ids = small_integers(np.random.default_rng(0), 90), names(90)
    first = index_builder(IndexSettings("IVF4,Flat", nprobe=4))(docs, ids, tmp_path).search(docs[:5], 10)
    assert not [one for one in recwarn if "visits" in str(one.message)]  # as nprobe is given
    with monkeypatch.context() as patched:
        patched.setattr(FaissIndex, "build", None)
        again = index_builder(IndexSettings("IVF4,Flat", nprobe=4))(docs, ids, tmp_path).search(docs[:5], 10)
    np.testing.assert_array_equal(first.doc_rows, again.doc_rows)
    index_builder(IndexSettings("HNSW8"))(docs, ids, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("factory", ["IVF16,Flat", "PCA16,IVF16,SQ8"])
def test_an_index_on_disk_gives_the_rankings_of_one_in_memory(corpus, tmp_path, monkeypatch, factory):
    docs, ids, queries = corpus
    monkeypatch.setattr(faiss_filling, "ADD_DOCS", 300)
    monkeypatch.setattr(faiss_filling, "PART_BYTES", 1)
    options = IndexSettings(nprobe=4, faiss_on_disk=True)
    expected = FaissIndex.build(docs, ids, factory=factory, options=IndexSettings(nprobe=4)).search(queries, 20)
    index = index_builder(dataclasses.replace(options, index=factory))(docs, ids, tmp_path)
    assert_same_ranking(index.search(queries, 20), expected)
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {"index.faiss", "lists.bin", "ids.json", "manifest.json", "checksums.json"}
    mapped = Path("/proc/self/maps").read_text()
    assert "lists.bin" in mapped
    assert "parts" not in mapped
    with monkeypatch.context() as patched:
        patched.setattr(FaissIndex, "build_on_disk", None)
        assert_same_ranking(
            index_builder(dataclasses.replace(options, index=factory))(docs, ids, tmp_path).search(queries, 20), expected
        )
    index.save(tmp_path / "saved")  # elsewhere, and over the files it maps
    index.save(folder)
    for saved in (folder, tmp_path / "saved"):
        assert_same_ranking(FaissIndex.load(saved, options=options).search(queries, 20), expected)
    (folder / faiss_index.LISTS_FILE).unlink()
    with pytest.raises(InputError, match=r"lists\.bin is missing"):
        FaissIndex.load(folder)


def test_lists_that_do_not_fit_on_the_disk_are_refused_before_they_are_written(corpus, tmp_path, monkeypatch):
    docs, ids, _ = corpus
    monkeypatch.setattr(faiss_filling.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"take 544,000 bytes while they are joined, and the disk of .* has 1,000"):
        FaissIndex.build_on_disk(docs, ids, tmp_path / "index", factory="IVF4,Flat")
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="an index on disk stands beside its embeddings"):
        index_builder(IndexSettings("IVF4,Flat", faiss_on_disk=True))(docs, ids)


@pytest.mark.soak
def test_an_index_of_four_times_the_memory_is_built_and_searched_on_disk(tmp_path):
    docs = np.random.default_rng(0).standard_normal((250_000, 256), np.float32)
    np.save(tmp_path / "docs.npy", docs)  # 256 MB, and as much in the lists
    program = """if True:
        import resource, sys
        import numpy as np
        from de_jax.retrieval import faiss_filling
        from de_jax.retrieval.faiss_index import FaissIndex
        from de_jax.retrieval.index_settings import IndexSettings
        faiss_filling.ADD_DOCS, faiss_filling.PART_BYTES = 4096, 8 << 20
        docs, folder = np.load(sys.argv[1] + "/docs.npy", mmap_mode="r"), sys.argv[1] + "/index"
        ids = [str(i) for i in range(250_000)]
        options = {"factory": "IVF16,Flat", "options": IndexSettings(nprobe=16), "train_size": 4096}
        FaissIndex.build(docs[:5000], ids[:5000], **options).search(docs[:5], 3)  # whatever FAISS allocates once
        used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20),) * 2)  # anonymous memory; mapped files do not count
        if sys.argv[2] == "on disk":
            found = FaissIndex.build_on_disk(docs, ids, folder, **options).search(docs[:50], 3)
        else:
            found = FaissIndex.build(docs, ids, **options).search(docs[:50], 3)
        assert (found.doc_rows[:, 0] == np.arange(50)).all()
    """

    def code(place):
        command = [sys.executable, "-c", program, str(tmp_path), place]
        return subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}, capture_output=True, check=False
        )

    assert (done := code("on disk")).returncode == 0, done.stderr
    assert b"MemoryError" in code("in memory").stderr


COMPRESSED = ["IVF4,PQ8x4", "PCA16,Flat", "SQfp16"]
LONG_TRAINED = ["PQ8", "IVF4,PQ8", "OPQ8,PQ8", "OPQ8_16,IVF4,PQ8x4fs"]


@pytest.mark.parametrize("factory", [*COMPRESSED, *(pytest.param(factory, marks=pytest.mark.soak) for factory in LONG_TRAINED)])
def test_compressed_indexes_find_the_nearest_among_their_first(factory, tmp_path):
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((40, 32))
    docs = (centres[rng.integers(0, 40, 2000)] + 0.3 * rng.standard_normal((2000, 32))).astype(np.float32)
    queries = docs[:50] + 0.01 * rng.standard_normal((50, 32)).astype(np.float32)
    options = IndexSettings(nprobe=4) if "IVF" in factory else IndexSettings()
    index = FaissIndex.build(docs, names(2000), factory=factory, options=options, seed=1)
    exact = ExactIndex(docs, names(2000)).search(queries, 10)
    found = index.search(queries, 100)
    recall = np.mean([len({*ours} & {*theirs}) / 10 for ours, theirs in zip(exact.doc_rows, found.doc_rows, strict=True)])
    assert recall > 0.8
    index.save(tmp_path / "saved")
    np.testing.assert_array_equal(
        FaissIndex.load(tmp_path / "saved", options=options).search(queries, 100).doc_rows, found.doc_rows
    )


@pytest.mark.parametrize("factory", ["IVF32,Flat", "PCA4,IVF32,Flat", "L2norm,IVF32,Flat", "IVF32,SQ8,RFlat"])
def test_inverted_lists_are_visited_by_their_number_wherever_they_stand_in_an_index(factory):
    docs = np.random.default_rng(0).standard_normal((640, 8), np.float32)
    with pytest.warns(UserWarning, match=f"{factory} visits 2 of its 32 lists"):
        FaissIndex.build(docs, names(640), factory=factory)


def test_rows_beyond_the_corpus_and_lists_beyond_their_file_are_refused(corpus, tmp_path):
    docs, ids, queries = corpus
    built = FaissIndex.build_on_disk(docs, ids, tmp_path / "index", factory="IVF4,Flat", options=IndexSettings(nprobe=4))
    built.save(tmp_path / "whole")
    lists = tmp_path / "index" / faiss_index.LISTS_FILE

    def replace(content):  # as a new file, since one that is mapped must not shrink
        lists.unlink()
        lists.write_bytes(content)

    replace(b"\x7f" * lists.stat().st_size)
    folders.write_checksums(tmp_path / "index", "faiss index")
    with pytest.raises(InputError, match=rf"holds document \d+ of {len(ids)}, so it is damaged; build the index again"):
        FaissIndex.load(tmp_path / "index").search(queries, 3)
    replace(lists.read_bytes()[:100])
    folders.write_checksums(tmp_path / "index", "faiss index")
    with pytest.raises(InputError, match=r"has lists beyond the 100 bytes of .*lists\.bin; build the index again"):
        FaissIndex.load(tmp_path / "index")
    assert FaissIndex.load(tmp_path / "whole").search(queries, 3).doc_rows.max() < len(ids)
