"""Training pairs from documents alone: queries from titles, headings, sentences and spans, kept if they find their document.

for pair in de_jax.documents.pairs_of("docs/"):
    print(pair["query"], pair["doc"])
"""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from de_jax.data.expansion.generated_queries import read_expansion
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import field_of
from de_jax.data.text.words import UNSPACED
from de_jax.model import Model, load
from de_jax.retrieval.bm25 import BM25Index
from de_jax.settings import PositiveInt, Seed, checked
from de_jax.types import InputError

SUFFIXES = (".md", ".txt", ".rst")
WORDS_OF_QUERY = (4, 24)
"""The fewest and the most words of a sentence or a span that becomes a query; two characters where no blank parts words."""
KEPT_SENTENCES = 0.1
"""The share of sentences that stay in their document, as Lee et al. (2019) have it; a query should not only match words."""
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$|^(\S.*)\n(?:={3,}|-{3,})$", re.MULTILINE)
_SENTENCE_END = re.compile("(?<=[.!?\u0964\u061f\u06d4])\\s+|(?<=[\u3002\uff01\uff1f])\\s*(?!$)")
"""Of Latin, Indian and Arabic scripts, and of Chinese and Japanese without a blank."""
_WORD = re.compile(rf"[{UNSPACED}]{{1,2}}|[^\s{UNSPACED}]+")


class Document(NamedTuple):
    """A document, or a section of a file under its heading."""

    doc_id: str
    title: str  # "" without
    text: str  # without the title

    @property
    def whole(self) -> str:
        """Title and text, as searches read it."""
        return f"{self.title} {self.text}".strip()


def is_alone(path: object) -> bool:
    """Whether a path is a folder of documents without judgements: of a corpus in the BEIR layout, or of text files."""
    if not isinstance(path, str | Path) or not Path(path).is_dir() or (Path(path) / "qrels").is_dir():
        return False
    return any(Path(path).glob("corpus.*")) or any(_text_files(Path(path)))


def read(path: str | Path) -> list[Document]:
    """The documents of a folder: of its corpus.jsonl or corpus.tsv, or the sections of its text files."""
    folder = Path(path)
    if any(folder.glob("corpus.*")):
        texts = beir.iter_docs(beir.find_file(folder, "corpus"), skip_empty=True)
        found = [Document(name, field_of(text, "title"), field_of(text, "text")) for name, text in texts]
    else:
        found = [one for file in sorted(_text_files(folder)) for one in _sections(file, str(file.relative_to(folder)))]
    if not found:
        raise InputError(f"{path} holds no documents; give a folder with a corpus.jsonl, or with files {', '.join(SUFFIXES)}.")
    return found


@checked
def pairs_of(
    path: str | Path,
    *,
    generated: str | Path | None = None,
    teacher: str | Path | Model | None = None,
    last_rank: PositiveInt = 3,
    seed: Seed = 0,
) -> list[dict[str, str]]:
    """Queries made from documents, each with its document.

    Of each document: its title or heading, with the text below it; a sentence, mostly with the document without it (inverse cloze
    task: Lee et al. 2019); and a span of words (Izacard et al. 2022). A query is kept if a search by it finds its document.

    Args:
        path: a folder, see `read`.
        generated: generated queries of these documents, an output of `de-jax doc2query`.
        teacher: a model, as of `load`, whose search must find the document too.
        last_rank: the last rank at which the document may be found.
        seed: of sentences and spans.

    Returns:
        Rows with "query" and "doc", for `fine_tune`.

    Raises:
        InputError: no documents, no query that finds its document, or generated queries of other documents.
    """
    docs = read(path)
    made = [(row, query, text) for row, one in enumerate(docs) for query, text in _queries(one, random.Random(f"{seed} {row}"))]
    made += _generated(docs, generated) if generated else []
    texts, queries, rows = [one.whole for one in docs], [query for _, query, _ in made], [row for row, _, _ in made]
    depth = min(last_rank, len(docs))
    found = BM25Index(texts, [one.doc_id for one in docs]).search(queries, depth).doc_rows
    is_kept = (found == np.array(rows)[:, None]).any(axis=1) if made else np.zeros(0, bool)
    if teacher is not None and is_kept.any():
        model = teacher if isinstance(teacher, Model) else load(teacher)
        index = model.index(model.encode_document(texts))
        kept = np.flatnonzero(is_kept)
        hits = index.search(model.encode_query([queries[place] for place in kept]), depth)
        is_kept[kept] = [rows[place] in [hit.row for hit in some] for place, some in zip(kept, hits, strict=True)]
    pairs = [{"query": query, "doc": text} for (_, query, text), keep in zip(made, is_kept, strict=True) if keep]
    if not pairs:
        raise InputError(f"no query made from the documents of {path} finds its document; give more or longer ones.")
    return pairs


def _queries(one: Document, rng: random.Random) -> Iterator[tuple[str, str]]:
    """The queries of a document, each with the text that it should find."""
    least, most = WORDS_OF_QUERY
    if one.title and one.text:
        yield one.title, one.text
    sentences = _SENTENCE_END.split(one.text)
    usable = [place for place, sentence in enumerate(sentences) if least <= len(_WORD.findall(sentence)) <= most]
    if usable and len(sentences) > 2:
        place = rng.choice(usable)
        rest = " ".join(sentences[:place] + sentences[place + 1 :])
        yield sentences[place], one.whole if rng.random() < KEPT_SENTENCES else f"{one.title} {rest}".strip()
    words = [*_WORD.finditer(one.text)]
    if len(words) > 2 * least:
        size = rng.randint(least, min(most, len(words) // 2))
        begin = rng.randrange(len(words) - size + 1)
        yield " ".join(one.text[words[begin].start() : words[begin + size - 1].end()].split()), one.whole


def _generated(docs: Sequence[Document], path: str | Path) -> list[tuple[int, str, str]]:
    rows = {one.doc_id: row for row, one in enumerate(docs)}
    made = []
    for doc_id, queries in read_expansion(path):
        if doc_id not in rows:
            raise InputError(f"{path} has queries of the document {doc_id!r}, which is not among those given.")
        made += [(rows[doc_id], query, docs[rows[doc_id]].whole) for query in dict.fromkeys(queries) if query.strip()]
    return made


def _sections(file: Path, name: str) -> Iterator[Document]:
    """The parts of a file, each below its heading; a file without headings is one document."""
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text; save it as UTF-8, or move it elsewhere.") from None
    title, begin, number = "", 0, 0
    headings = [*_HEADING.finditer(content)]
    for heading in (*headings, None):
        text = " ".join(content[begin : heading.start() if heading else None].split())
        if text:
            yield Document(f"{name}#{number}", title, text)
            number += 1
        if heading:
            title, begin = heading[1] or heading[2], heading.end()


def _text_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
