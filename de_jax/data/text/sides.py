"""The two sides of a pair, queries and documents: how a tower's texts become tokens."""

from __future__ import annotations

from typing import NamedTuple

from de_jax.data.text.tokenizing import Tokenizer, prompt_of, with_prompt


class Side(NamedTuple):
    """How the texts of one tower are read."""

    tokenizer: Tokenizer  # its prompt included
    max_length: int  # tokens, special ones included; of a passage, where a text has several
    max_passages: int = 1  # of a text, which scores as its best one

    @property
    def prompt(self) -> str:
        """The prompt before every text; mostly empty."""
        return prompt_of(self.tokenizer)

    def with_prompt(self, prompt: str | None) -> Side:
        """The same with another prompt; "" takes its own away, and None leaves it."""
        return self._replace(tokenizer=with_prompt(self.tokenizer, prompt))
