"""`de-jax serve`: a model over HTTP."""

import sys
from typing import Any

from de_jax import server
from de_jax.arguments import Model, Port
from de_jax.command import THIS_MACHINE, check_port
from de_jax.data.text import beir
from de_jax.flags import rules
from de_jax.model import Model as Encoder
from de_jax.retrieval import faiss_index
from de_jax.retrieval.index_settings import IndexSettings
from de_jax.retrieval.searcher import open_searcher, texts_of
from de_jax.settings import LocalPath, PositiveInt
from de_jax.types import InputError

WARM_TEXTS = range(1, 72, 3)
"""Numbers of short texts that take every shape of batches of up to 64 clients."""


@rules(without={"dataset_dir": ("embeddings_dir", "skip_empty", "index")})
def serve(
    model: Model,
    index: IndexSettings,
    *,
    dataset_dir: LocalPath | None = None,
    embeddings_dir: LocalPath | None = None,
    skip_empty: bool = False,
    truncate_dim: PositiveInt | None = None,
    host: str = "127.0.0.1",
    port: Port = 8000,
    max_waiting_texts: PositiveInt = 4096,
    max_body_bytes: PositiveInt = 8388608,
) -> None:
    """Serves a model: the embeddings call of OpenAI, and search in a corpus.

    de-jax serve --run_dir=runs/sde
    de-jax serve --run_dir=runs/sde --dataset_dir=data/beir/scifact --backend=onnx --port=8080

    Needs pip install 'de-jax-retrieval[serve]'. A client names the tower as the model, "query" or "document":

    curl 127.0.0.1:8000/v1/embeddings -d '{"model": "query", "input": "how high is mont blanc"}'
    curl 127.0.0.1:8000/search -d '{"query": "how high is mont blanc", "k": 10}'

    Requests that wait at the same time are encoded together. /health and /metrics (Prometheus) say how it is doing. Prints the
    address. Ctrl-C or SIGTERM answers the requests that are there and ends. There is no password: keep --host, or put a proxy in
    front.

    Args:
        dataset_dir: a BEIR folder or a table with the corpus; default no search.
        truncate_dim: keep the first dimensions only, for a Matryoshka model.
        max_waiting_texts: texts that may wait for all clients; further requests get the status 429.
        max_body_bytes: size of a request.
    """
    if dataset_dir:
        beir.find_file(dataset_dir, "corpus")
        if truncate_dim:
            raise InputError("--dataset_dir is searched by whole embeddings, so leave --truncate_dim out.")
    check_port(host, port)
    encoder = Encoder(model.open(), truncate_dim=truncate_dim)
    searcher = None
    if dataset_dir:
        corpus, texts = texts_of(dataset_dir, skip_empty)
        options: dict[str, Any] = {"embeddings_dir": embeddings_dir, "skip_empty": skip_empty}
        build_index = faiss_index.index_builder(index)
        searcher = open_searcher(encoder.run, corpus, texts, build_index=build_index, **options)
    limits = server.Limits(body_bytes=max_body_bytes, waiting_texts=max_waiting_texts)
    served = server.Server(encoder, searcher, limits)
    app = served.app()
    for tower in server.TOWERS.values():  # compiles, so that no client waits for it
        served.encode(tower, ["how high is mont blanc " * 4])
        for number in WARM_TEXTS:  # equal texts would be encoded once
            served.encode(tower, [f"how high is mont blanc {place}" for place in range(number)])
    if host not in THIS_MACHINE:
        print("Everyone who can reach the address can use this model.", file=sys.stderr)
    server.run(app, host=host, port=port)
