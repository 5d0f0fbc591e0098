import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from de_jax.data.text import tokenizing, vocabulary_training
from de_jax.types import InputError

SHARED_DATA = Path(os.environ.get("DE_JAX_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
needs_t5 = pytest.mark.skipif(not (SHARED_DATA / "tokenizers/t5").is_dir(), reason="no real T5 vocabulary on this machine")


def write_wordpiece(folder, *, specials=("[PAD]", "[UNK]", "[CLS]", "[SEP]"), words=("hello", "world", "a", "[", "]", "sep")):
    """A BERT-like tokenizer.json that truncates and pads, as published ones often do."""
    import tokenizers

    vocab = {piece: index for index, piece in enumerate((*specials, *words))}
    wordpiece = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    wordpiece.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    wordpiece.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    wordpiece.add_special_tokens(list(specials))
    pairs = [("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    wordpiece.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=pairs)
    wordpiece.enable_truncation(4)
    wordpiece.enable_padding(length=8, pad_id=vocab["[PAD]"])
    folder.mkdir(exist_ok=True)
    wordpiece.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["WordPiece", "sentencepiece"])
def test_texts_of_which_a_vocabulary_knows_little_are_told(kind, tmp_path, tokenizer, recwarn):
    read = tokenizing.load_tokenizer(write_wordpiece(tmp_path)) if kind == "WordPiece" else tokenizer
    known = "hello world" if kind == "WordPiece" else "the quick brown fox"
    read.encode([f"{known} {known} {known} {known}"] * 5 + ["東"] * 4)
    read.encode(["東 京 の 人 口 は 何 人 で す か"])  # one text may be anything
    assert not recwarn
    read.encode(["東 京 の 人 口 は 何 人 で す か"] * 8)
    assert ["in most of the texts, more than a tenth of the tokens are unknown" in str(one.message) for one in recwarn] == [True]


def test_sentencepiece_has_eos_as_suffix_and_no_prefix(tokenizer):
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.vocab_size) == ((), (1,), 36)
    encoded = tokenizer.encode(["the quick brown fox", "dog"])
    assert [ids.dtype for ids in encoded] == [np.int32, np.int32]
    assert all(ids.size and ids.min() > 2 and ids.max() < 36 for ids in encoded)


def test_batch_encoding_equals_one_by_one(tokenizer):
    texts = ["the quick brown fox", "seven wizards", "a"] * 40
    for alone, together in zip([tokenizer.encode([one])[0] for one in texts], tokenizer.encode(texts), strict=True):
        np.testing.assert_array_equal(alone, together)


def test_wordpiece_specials_are_kept_apart_and_text_is_neither_cut_nor_padded(tmp_path):
    tokenizer = tokenizing.load_tokenizer(write_wordpiece(tmp_path))
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.vocab_size) == ((2,), (3,), 10)
    assert [ids.tolist() for ids in tokenizer.encode(["Hello world a a a a", "a"])] == [[4, 5, 6, 6, 6, 6], [6]]


def test_a_special_token_spelt_out_in_a_text_is_text(tmp_path):
    tokenizer = tokenizing.load_tokenizer(write_wordpiece(tmp_path))
    assert tokenizer.encode(["hello [SEP]"])[0].tolist() == [4, 7, 9, 8]


@pytest.mark.parametrize("prompt", ["", "fox: "])
def test_spans_say_where_in_the_text_each_token_comes_from(tmp_path, tokenizer, prompt):
    text = "the  fœx \u65e5\u672c the dog"
    sentencepiece = tokenizing.with_prompt(tokenizer, prompt)
    wordpiece = tokenizing.with_prompt(tokenizing.load_tokenizer(write_wordpiece(tmp_path)), prompt)
    for one, words in ((sentencepiece, text.split()), (wordpiece, ["the", "fœx", "\u65e5", "\u672c", "the", "dog"])):
        spans = one.spans(text)
        assert len(spans) == len(one.encode([text])[0])
        assert all(0 <= begin <= end <= len(text) for begin, end in spans)
        assert "".join(text[begin:end] for begin, end in spans).split() == " ".join(words).split() or one is wordpiece
        if one is wordpiece:
            assert [text[begin:end] for begin, end in spans if begin < end] == words
    with pytest.raises(InputError, match="is not UTF-8"):
        sentencepiece.spans("fox \udc80")


def test_saved_tokenizers_load_again_with_the_same_fingerprint(tmp_path, tokenizer):
    for number, original in enumerate([tokenizer, tokenizing.load_tokenizer(write_wordpiece(tmp_path / "json"))]):
        copy_dir = tmp_path / str(number)
        copy_dir.mkdir()
        original.save(copy_dir)
        copy = tokenizing.load_tokenizer(copy_dir)
        assert copy.fingerprint == original.fingerprint
        np.testing.assert_array_equal(copy.encode(["hello dog"])[0], original.encode(["hello dog"])[0])


def test_a_tokenizer_file_may_be_named_itself(spiece, tokenizer):
    assert tokenizing.load_tokenizer(spiece / "spiece.model").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("prompt", [None, "query: "])
def test_half_of_a_surrogate_pair_is_refused_in_one_sentence(tmp_path, tokenizer, prompt):
    for one in (tokenizer, tokenizing.load_tokenizer(write_wordpiece(tmp_path))):
        with pytest.raises(InputError, match=r"the text .*fox \\udc80' is not UTF-8"):
            tokenizing.with_prompt(one, prompt).encode(["a", "fox \udc80"])


def test_padding_of_another_id_changes_places_with_id_zero(tmp_path):
    plain = tokenizing.load_tokenizer(write_wordpiece(tmp_path / "plain"))
    tokenizer = tokenizing.load_tokenizer(write_wordpiece(tmp_path / "json", specials=("[CLS]", "[PAD]", "[SEP]", "[UNK]")))
    assert (plain.pad_id, tokenizer.pad_id) == (0, 1)
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.vocab_size) == ((1,), (2,), 10)
    assert tokenizer.encode(["Hello world strange"])[0].tolist() == [4, 5, 3]
    words = write_wordpiece(tmp_path / "word", specials=("hello", "[UNK]", "[CLS]", "[PAD]", "[SEP]"), words=("world",))
    assert tokenizing.load_tokenizer(words).encode(["hello world"])[0].tolist() == [3, 5]


def test_prompt_stands_before_every_text_and_is_saved_with_the_vocabulary(tmp_path, tokenizer):
    prompted = tokenizing.PromptedTokenizer(tokenizer, "quick fox: ")
    assert prompted.encode(["dog"])[0].tolist() == tokenizer.encode(["quick fox: dog"])[0].tolist()
    assert prompted.decode([*prompted.encode(["dog"]), *tokenizer.encode(["fox"])]) == ["dog", "fox"]
    assert (prompted.prefix_ids, prompted.suffix_ids, prompted.vocab_size) == ((), (1,), 36)
    assert len({prompted.fingerprint, tokenizer.fingerprint, tokenizing.PromptedTokenizer(tokenizer, "fox: ").fingerprint}) == 3
    prompted.save(tmp_path)
    again = tokenizing.load_tokenizer(tmp_path)
    assert (again.prompt, again.fingerprint) == (prompted.prompt, prompted.fingerprint)
    (tmp_path / "prompt.json").write_text('{"prompts": 3}')
    with pytest.raises(InputError, match=r"prompt\.json: prompt is absent"):
        tokenizing.load_tokenizer(tmp_path)


def test_vocabulary_without_padding_is_refused(tmp_path):
    import sentencepiece

    write_wordpiece(tmp_path / "json")
    without = json.loads((tmp_path / "json" / "tokenizer.json").read_text().replace("[PAD]", "[pad]"))
    (tmp_path / "json" / "tokenizer.json").write_text(json.dumps({**without, "padding": None}))
    with pytest.raises(InputError, match="has no id for padding"):
        tokenizing.load_tokenizer(tmp_path / "json")
    model = tmp_path / "other.model"
    with open(model, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["abc abd bcd"] * 9), model_writer=file, vocab_size=12, hard_vocab_limit=False, minloglevel=2
        )
    with pytest.raises(InputError, match="padding id must be 0 and is none"):
        tokenizing.load_tokenizer(model)


def test_unusable_vocabulary_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"holds neither spiece\.model nor tokenizer\.json"):
        tokenizing.load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        tokenizing.load_tokenizer(tmp_path / "absent" / "spiece.model")
    (tmp_path / "spiece.model").write_bytes(b"not a model")
    with pytest.raises(InputError, match="is not a sentencepiece model"):
        tokenizing.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(InputError, match=r"is not a tokenizer\.json"):
        tokenizing.load_tokenizer(tmp_path / "tokenizer.json")


def test_a_sentencepiece_model_cut_off_between_two_of_its_parts_is_refused(tmp_path, spiece):
    """The library itself takes one without its last pieces."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString((spiece / "spiece.model").read_bytes())
    for part in ("normalizer_spec", "trainer_spec"):
        model.ClearField(part)
        (tmp_path / "spiece.model").write_bytes(model.SerializeToString())
        with pytest.raises(InputError, match=r"spiece\.model is cut off"):
            tokenizing.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"hello": 4', '"hello": 5, "hello": 4', "the key 'hello' is there twice"),
        ('"[UNK]": 1', '"[unk]": 1', r"is not a tokenizer\.json \(.*UNK"),
    ],
)
def test_a_vocabulary_that_would_fail_later_is_refused_when_loaded(tmp_path, old, new, message):
    file = write_wordpiece(tmp_path) / "tokenizer.json"
    written = json.dumps(json.loads(file.read_text()))
    assert old in written
    file.write_text(written.replace(old, new).replace('"content": "[UNK]"', '"content": "[PAD]"'))
    with pytest.raises(InputError, match=message):
        tokenizing.load_tokenizer(file)


def test_a_link_to_nothing_is_no_absent_file(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"tokenizer\.json does not exist"):
        tokenizing.load_tokenizer(tmp_path)


def test_training_twice_gives_the_same_bytes(tmp_path):
    texts = [f"word{number} and another text number {number * 7}" for number in range(300)]
    for name in ("first", "second"):
        vocabulary_training.train_sentencepiece(iter(texts), tmp_path / name, vocab_size=50, max_texts=200, seed=3)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_impossible_vocabulary_sizes_are_told_with_the_possible_one(tmp_path):
    texts = ["the quick brown fox"] * 20
    with pytest.raises(InputError, match=r"vocabulary of 5000 pieces: Vocabulary size too high .* value <= \d+\.$"):
        vocabulary_training.train_sentencepiece(texts, tmp_path / "model", vocab_size=5000)
    with pytest.raises(InputError, match=r"vocabulary of 5 pieces: Vocabulary size is smaller than required_chars\. 5 vs \d+"):
        vocabulary_training.train_sentencepiece(texts, tmp_path / "model", vocab_size=5)
    with pytest.raises(InputError, match="vocabulary of 50 pieces: there is no text"):
        vocabulary_training.train_sentencepiece([], tmp_path / "model", vocab_size=50)
    assert not list(tmp_path.iterdir())


def test_importing_the_data_side_loads_no_heavy_library():
    heavy = ["jax", "sentencepiece", "tokenizers", "tqdm"]
    code = "import sys, de_jax.data.text.tokenizing, de_jax.data.stores.corpus, de_jax.data.batches.pair_batches; "
    code += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@needs_t5
def test_t5_vocabulary_gives_the_published_ids(shared_data):
    tokenizer = tokenizing.load_tokenizer(shared_data / "tokenizers/t5")
    sentence = "translate English to German: The house is wonderful."
    assert tokenizer.encode([sentence])[0].tolist() == [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5]
    assert (tokenizer.vocab_size, tokenizer.suffix_ids) == (32000, (1,))


@needs_t5
def test_t5_vocabulary_equals_transformers(shared_data):
    import transformers

    theirs = transformers.T5Tokenizer.from_pretrained(str(shared_data / "tokenizers/t5"))
    ours = tokenizing.load_tokenizer(shared_data / "tokenizers/t5")
    texts = ["translate English to German: The house is wonderful.", "  Two  spaces, é, naïve, 北京, 1.5e-3 (x_1).", "A\nB\tC"]
    for sentence, ids in zip(texts, ours.encode(texts), strict=True):
        assert [*ours.prefix_ids, *ids.tolist(), *ours.suffix_ids] == theirs(sentence)["input_ids"]
