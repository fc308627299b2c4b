"""A word-level tokenizer with open_clip's calling convention."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

PAD, UNKNOWN, START, END = "<pad>", "<unknown>", "<start>", "<end>"


class WordTokenizer:
    """Splits text into lower-case words of a fixed vocabulary; punctuation is dropped, other words become `<unknown>`.

    `<end>` has the largest id, because open_clip's CLIP pools a text at its largest token id.

    Attributes:
        words: The vocabulary without the special tokens.
        encoder: Id of every token.
        context_length: Tokens in a row of the output, start and end included.
        vocab_size: Words and special tokens.
    """

    def __init__(self, words: Sequence[str], context_length: int) -> None:
        self.words = tuple(words)
        self.context_length = context_length
        self._tokens = (PAD, UNKNOWN, START, *self.words, END)
        self.encoder = {token: i for i, token in enumerate(self._tokens)}
        self.vocab_size = len(self._tokens)

    def encode(self, text: str) -> list[int]:
        """Ids of all words of a text between `<start>` and `<end>`, however many there are."""
        words = re.findall(r"\w+", text.lower())
        unknown = self.encoder[UNKNOWN]
        return [self.encoder[START], *(self.encoder.get(word, unknown) for word in words), self.encoder[END]]

    def decode(self, ids: Sequence[int]) -> str:
        """The words of a row of ids, without padding, start and end."""
        return " ".join(token for token in (self._tokens[i] for i in ids) if token not in (PAD, START, END))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text before truncation; more than `context_length` means that its last words are lost."""
        return len(self.encode(text))

    def __call__(self, texts: str | Sequence[str], context_length: int | None = None) -> torch.Tensor:
        """Tokens of one or many texts.

        Args:
            texts: B texts, or one.
            context_length: Tokens per row, by default the model's own.

        Returns:
            (B, context_length) int64, padded with 0; longer texts are cut, keeping `<end>` as the last token.
        """
        length = context_length or self.context_length
        texts = [texts] if isinstance(texts, str) else texts
        rows = torch.zeros(len(texts), length, dtype=torch.long)
        for row, text in zip(rows, texts, strict=True):
            ids = self.encode(text)
            if len(ids) > length:
                ids = [*ids[: length - 1], self.encoder[END]]
            row[: len(ids)] = torch.tensor(ids)
        return rows
