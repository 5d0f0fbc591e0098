"""The two sides of a pair, queries and documents: how a tower's texts become tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from de_jax.data.text.tokenizing import Tokenizer, fields_of, prompt_of, with_prompt
from de_jax.types import FieldName


class Side(NamedTuple):
    """How the texts of one tower are read."""

    tokenizer: Tokenizer  # its prompt and fields included
    max_length: int  # tokens, special ones included; of a passage, where a text has several
    max_passages: int = 1  # of a text, which scores as its best one

    @property
    def prompt(self) -> str:
        """The prompt before every text; mostly empty."""
        return prompt_of(self.tokenizer)

    @property
    def fields(self) -> tuple[FieldName, ...]:
        """The fields of a document that are separated; mostly none."""
        return fields_of(self.tokenizer)

    def with_prompt(self, prompt: str | None, fields: Sequence[FieldName] | None = None) -> Side:
        """The same with another prompt and other fields; "" and () take its own away, and None leaves them."""
        return self._replace(tokenizer=with_prompt(self.tokenizer, prompt, fields))
