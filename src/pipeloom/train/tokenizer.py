"""Text to tokens and back."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from pipeloom.errors import UserError

if TYPE_CHECKING:
    import tokenizers

TokenArray = npt.NDArray[np.int64] | npt.NDArray[np.uint32] | npt.NDArray[np.uint16]
"""Tokens, [tokens]; the type is as wide as the vocabulary needs, or int64."""

_END_OF_TEXT = "<|endoftext|>"
_BLOCK_BYTES = 16 * 1024
_BLOCKS_AT_ONCE = 256


class Tokenizer(Protocol):
    """What the rest of the program knows about a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens; they are 0..vocab_size-1."""
        ...

    @property
    def end_of_text(self) -> int:
        """The token between two documents. No text encodes to it."""
        ...

    def encode(self, text: bytes) -> TokenArray:
        """UTF-8 text to tokens, [tokens]; the end-of-text token is not added."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Tokens to text. End-of-text tokens are left out; bytes that are no UTF-8 become U+FFFD."""
        ...


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The narrowest type, of two, that a vocabulary's tokens fit into."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class ByteTokenizer:
    """One token a byte; the last token is end of text."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: bytes) -> TokenArray:
        """Any bytes to tokens, [bytes]."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Tokens to text, as in :class:`Tokenizer`."""
        return bytes(token for token in ids if token != self.end_of_text).decode(errors="replace")


class BpeTokenizer:
    """Byte-pair encoding over bytes, by the ``tokenizers`` library; any text survives a round trip.

    Made by :meth:`train` or :meth:`load`.

    Args:
        encoding: the library's tokenizer, which knows the end-of-text token.
    """

    def __init__(self, encoding: "tokenizers.Tokenizer") -> None:
        end_of_text = encoding.token_to_id(_END_OF_TEXT)
        assert end_of_text is not None, "a tokenizer without an end-of-text token"
        encoding.encode_special_tokens = True  # a document that spells the token out does not end there
        self._encoding = encoding
        self.end_of_text: int = end_of_text
        self.vocab_size: int = encoding.get_vocab_size()

    @classmethod
    def train(cls, texts: Sequence[bytes], vocab_size: int) -> "BpeTokenizer":
        """Learn the merges from text.

        Args:
            texts: UTF-8 text; a few megabytes are enough.
            vocab_size: tokens to end up with, end of text and 256 bytes included. Little text may give fewer.

        Raises:
            UserError: ``vocab_size`` is too small, or the ``tokenizers`` library is missing.
        """
        if vocab_size < 257:
            raise UserError(
                f"data.bpe_vocab_size must be at least 257 (the bytes and end of text), found {vocab_size}; raise it"
            )
        require_bpe()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        encoding = Tokenizer(models.BPE())
        encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoding.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[_END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        encoding.train_from_iterator((block for text in texts for block in _blocks(text)), trainer)
        return cls(encoding)

    @classmethod
    def load(cls, path: Path) -> "BpeTokenizer":
        """Read what :meth:`save` wrote.

        Raises:
            UserError: the ``tokenizers`` library is missing.
        """
        require_bpe()
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON in the library's own format."""
        self._encoding.save(str(path))

    def encode(self, text: bytes) -> TokenArray:
        """Text to tokens; long text goes in blocks of whole lines, which bounds memory and uses all cores."""
        dtype = token_dtype(self.vocab_size)
        blocks, parts = _blocks(text), [np.empty(0, dtype)]
        for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
            encoded = self._encoding.encode_batch_fast(blocks[first : first + _BLOCKS_AT_ONCE])
            parts += [np.array(block.ids, dtype) for block in encoded]
        return np.concatenate(parts)

    def decode(self, ids: Iterable[int]) -> str:
        """Tokens to text, as in :class:`Tokenizer`."""
        return self._encoding.decode(list(ids), skip_special_tokens=True)


def require_bpe() -> None:
    """Check that byte-pair encoding can be used.

    Raises:
        UserError: the ``tokenizers`` library is missing.
    """
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise UserError(
            "tokenizer bpe needs the tokenizers library: pip install 'pipeloom[bpe]', or set data.tokenizer to bytes"
        ) from error


def _blocks(text: bytes) -> list[str]:
    """Text cut after a newline about every 16 KiB."""
    blocks: list[str] = []
    begin = 0
    while begin < len(text):
        end = text.find(b"\n", begin + _BLOCK_BYTES) + 1 or len(text)
        blocks.append(text[begin:end].decode(errors="replace"))
        begin = end
    return blocks
