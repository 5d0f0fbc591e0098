"""One small folder of every kind that this library writes."""

import jax
import numpy as np
from letters import Letters

from de_jax.data.batches.teacher_scores import GUIDE
from de_jax.data.expansion import curriculum
from de_jax.data.expansion.generated_queries import DocQueries, ExpansionWriter
from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources import pair_writer
from de_jax.data.stores import corpus
from de_jax.data.text.tokenizing import Side
from de_jax.doc2query.generator_run import GENERATOR_RUN
from de_jax.files import folders
from de_jax.interop import safetensors_model, t5x
from de_jax.mining import teacher
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.generator import Generator
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.retrieval import embedding_files, faiss_index
from de_jax.retrieval.embedding_files import EmbeddingWriter
from de_jax.retrieval.vector_index import VectorIndex
from de_jax.training.run import run_folder
from de_jax.training.run.run_folder import Run, write_run

TOWER = TowerConfig(T5Config(vocab_size=30, model_dim=4, num_layers=1, num_heads=1, head_dim=4, mlp_dim=4), projection_dim=2)
MODEL = DualEncoder(TOWER, TOWER)


def write_token_store(folder, tokenizer):
    corpus.build_token_store([("a", "bc"), ("b", "d")], Letters(), folder, progress=False)


def write_pair_store(folder, tokenizer):
    texts = {"query": tokenizer.encode(["the fox", "a dog"]), "doc": tokenizer.encode(["the quick fox", "a lazy dog"])}
    chunk = {"query_id": ["q0", "q1"], "doc_id": ["d0", "d1"], **texts}
    source = pair_writer.PairSource("pairs", 1.0, lambda: iter([chunk]), {"query": None, "doc": None})
    pair_writer.write(folder, [source], [], {"query": tokenizer, "doc": tokenizer}, made_from="test")


def write_index(folder, tokenizer):
    faiss_index._save(folder, lambda path: path.write_bytes(b"vectors"), ["a"], "Flat", 2)


def write_vector_index(folder, tokenizer):
    docs, doc_rows = np.array([[1, 2], [0.5, -1], [2, 2]], np.float32), np.array([0, 0, 1])
    VectorIndex.build(docs, ["a", "b"], precision="int8", doc_rows=doc_rows).save(folder)


def write_t5x(folder, tokenizer):
    t5x.write(folder, MODEL, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), MODEL.shapes()), 1)


def write_generation(folder, tokenizer):
    generations.write_lines(folder.parent, int(folder.name), [Mined("q", "d", [], [])], {})


def import_run(folder, tokenizer):
    write_run(folder, {}, model=MODEL, query=Side(tokenizer, 8), doc=Side(tokenizer, 8))


def write_embeddings(folder, tokenizer):
    writer = EmbeddingWriter(folder, {"num_texts": 2, "model": "m"}, {"texts_per_shard": 2})
    writer.append(np.ones((2, 3), np.float32))
    writer.finish(["a", "b"])
    embedding_files.keep_hashes(folder, np.arange(2, dtype=np.uint64))


def write_expansion(folder, tokenizer):
    expansion = ExpansionWriter(folder, {"seed": 0})
    expansion.append([DocQueries("d", ["a fox"])])
    expansion.finish(num_docs=1)


def write_ranked_queries(folder, tokenizer):
    ranked = curriculum.RankedQueries(np.array([1, 0], np.int32), np.array([2, 1], np.float32), np.array([0, 2], np.int64))
    curriculum.cached_ranking(folder.parent, {"measure": "rouge_l"}, lambda: [ranked])
    next(folder.parent.glob("ranked-*")).rename(folder)


def describe_run(folder, tokenizer):
    run_folder.describe_run(folder, model=MODEL, query=Side(tokenizer, 8), doc=Side(tokenizer, 8))


def describe_generator(folder, tokenizer):
    model = Generator(TOWER.encoder)
    description = {"model": model.to_json(), "tokenizer": tokenizer.fingerprint, "max_query_length": 8, "max_doc_length": 8}
    run_folder.describe(GENERATOR_RUN, folder, description, Generator.from_json, [tokenizer])


def write_teacher_scores(folder, tokenizer):
    candidates = teacher.Candidates({"q": "a"}, {"d": "b"}, [("q", "d")])
    teacher.write(folder, candidates, "a teacher", lambda: lambda pairs: np.ones(len(pairs)))


def write_guide(folder, tokenizer):
    for kind in ("queries", "docs"):
        write_embeddings(folder / kind, tokenizer)
    GUIDE.complete(folder, {"guide": "a model", "dim": 3, "texts": {"queries": "these", "docs": "those"}}, folders.names(folder))


def write_model(folder, tokenizer):
    folder.mkdir()
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), MODEL.shapes())
    safetensors_model.write(folder, Run(folder, 0, MODEL, params, Side(tokenizer, 8), Side(tokenizer, 8)))
