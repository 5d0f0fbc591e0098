"""Vocabularies trained on texts: sentencepiece models as T5 has them, and WordPiece as BERT has it."""

import io
from collections.abc import Iterable
from pathlib import Path

from de_jax.data.text.tokenizing import PAD_ID
from de_jax.files import outputs
from de_jax.types import InputError

_BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_sentencepiece(
    texts: Iterable[str], model_file: str | Path, *, vocab_size: int, seed: int = 0, max_texts: int = 1_000_000
) -> None:
    """Trains a unigram vocabulary in T5's layout (padding 0, `</s>` 1, `<unk>` 2, no begin symbol) and writes it to `model_file`.

    The same texts, size and seed give the same bytes, whatever the machine's number of processors.
    """
    import sentencepiece

    sentencepiece.set_random_generator_seed(seed)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            pad_id=PAD_ID,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            byte_fallback=False,
            input_sentence_size=max_texts,
            shuffle_input_sentence=True,
            max_sentence_length=1 << 20,  # bytes; the default drops every text beyond 4,192
            num_threads=4,  # floats are summed by thread, so another number gives another vocabulary
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].rstrip(".") or "there is no text"
        raise InputError(f"sentencepiece cannot train a vocabulary of {vocab_size} pieces: {reason}.") from None
    with outputs.atomic_file(model_file) as temporary:
        temporary.write_bytes(model.getvalue())


def train_wordpiece(texts: Iterable[str], tokenizer_file: str | Path, *, vocab_size: int) -> None:
    """Trains a WordPiece vocabulary as BERT's, uncased, and writes it to `tokenizer_file`, a `tokenizer.json`.

    The ids 0 to 4 are [PAD], [UNK], [CLS], [SEP] and [MASK]; a text is put between [CLS] and [SEP]. Two trainings may number the
    pieces otherwise.
    """
    import tokenizers

    bert = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token=_BERT_TOKENS[1]))
    bert.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    bert.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    bert.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=list(_BERT_TOKENS), show_progress=False)
    bert.train_from_iterator(texts, trainer)
    found = bert.get_vocab_size()
    if found <= len(_BERT_TOKENS):
        raise InputError("no text to train a vocabulary on.")
    if found > vocab_size:
        raise InputError(f"a vocabulary of {vocab_size} pieces is too small for these texts; the least is {found}.")
    of_text = {token: bert.token_to_id(token) for token in ("[CLS]", "[SEP]")}
    bert.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=list(of_text.items()))
    with outputs.atomic_file(tokenizer_file) as temporary:
        temporary.write_text(bert.to_str(), encoding="utf-8")
