"""A vocabulary of letters, so that a text's tokens can be read off."""

import numpy as np


class Letters:
    """One token a letter, 2 to 27; 28 before and 1 after each text."""

    vocab_size, pad_id, prefix_ids, suffix_ids, fingerprint = 29, 0, (28,), (1,), "letters"

    def encode(self, texts):
        return [np.array([ord(letter) - 95 for letter in text], np.int32) for text in texts]

    def decode(self, ids):
        return ["".join(chr(token + 95) for token in row if 2 <= token < 28) for row in ids]

    def save(self, directory):
        raise NotImplementedError
