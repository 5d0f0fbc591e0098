"""Vocabularies as transformers reads them: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from de_jax.data.text.tokenizing import SENTENCEPIECE_FILE, TOKENIZER_JSON_FILE, Tokenizer
from de_jax.files import outputs

SPACE = "▁"
UNKNOWN, CONTROL, BYTE = 2, 3, 6  # kinds of pieces in sentencepiece's model file


def write(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Writes a vocabulary into a folder so that AutoTokenizer cuts texts to `max_length` and gives the same ids.

    A sentencepiece model stands beside its translation, which transformers prefers.
    """
    tokenizer.save(folder)
    if (folder / SENTENCEPIECE_FILE).is_file():
        _translate((folder / SENTENCEPIECE_FILE).read_bytes()).save(str(folder / TOKENIZER_JSON_FILE))
    import tokenizers

    known = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_JSON_FILE))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "PreTrainedTokenizerFast",  # of a model type whose own reads images too
        "model_max_length": max_length,
        "pad_token": known.id_to_token(tokenizer.pad_id),
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    outputs.write_json(folder / "tokenizer_config.json", settings)


def _translate(model_file: bytes) -> Any:
    """A sentencepiece unigram model as a `tokenizers.Tokenizer` with the same ids."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    model: Any = sentencepiece_model_pb2.ModelProto.FromString(model_file)  # type: ignore[attr-defined]
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    kinds = [piece.type for piece in model.pieces]
    tokenizer = Tokenizer(models.Unigram(pieces, kinds.index(UNKNOWN), BYTE in kinds))
    steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if charsmap := model.normalizer_spec.precompiled_charsmap:
        steps.insert(0, normalizers.Precompiled(charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always", split=True)
    tokenizer.decoder = decoders.Metaspace(SPACE, "always", split=True)
    specials = [piece for (piece, _), kind in zip(pieces, kinds, strict=True) if kind in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in specials])
    end = model.trainer_spec.eos_piece
    if (eos_id := model.trainer_spec.eos_id) >= 0:
        tokenizer.post_processor = processors.TemplateProcessing(f"$A {end}", f"$A {end} $B {end}", [(end, eos_id)])
    return tokenizer
