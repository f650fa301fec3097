"""Tokenizers: bytes, and byte-pair encoding.

Both are stored as ``tokenizer.json`` in the format of the ``tokenizers`` library, which can decode their tokens. The
byte tokenizer does not need the library.
"""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeloom.errors import UserError

if TYPE_CHECKING:
    import tokenizers

TokenArray = npt.NDArray[np.int64] | npt.NDArray[np.uint32] | npt.NDArray[np.uint16]
"""Tokens, [tokens]; in the narrowest dtype for the vocabulary (``token_dtype``), or int64."""

_END_OF_TEXT = "<|endoftext|>"
# Blocks of this size keep all cores busy with a batch of 256, which is 4 MiB of text and its tokens in memory.
_BLOCK_BYTES = 16 * 1024
_BLOCKS_AT_ONCE = 256


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The dtype of stored tokens: uint16 if the vocabulary fits, else uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class ByteTokenizer:
    """One token per byte, and one for end of text.

    Attributes:
        vocab_size: number of tokens; tokens are 0..vocab_size-1.
        end_of_text: the token after each document. No text encodes to it.
    """

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: bytes) -> TokenArray:
        """Encode UTF-8 text to [tokens], without an end-of-text token."""
        # Not uint8: end of text is 256.
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text. End-of-text tokens are dropped; invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in ids if token != self.end_of_text).decode(errors="replace")

    def to_json(self) -> str:
        """The ``tokenizer.json`` of the ``tokenizers`` library: BPE without merges; a byte's token is its value."""
        end = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        # Without a prefix space, so that decoding returns the same text.
        by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        tree = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": self.end_of_text, "content": _END_OF_TEXT, **end}],
            "normalizer": None,
            "pre_tokenizer": by_byte,
            "post_processor": None,
            "decoder": by_byte,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                # Each byte is its own symbol, and there are no merges, so each byte encodes to its value.
                "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
                "merges": list[str](),
            },
        }
        return json.dumps(tree, indent=2, ensure_ascii=False)


class BpeTokenizer:
    """Byte-level byte-pair encoding by the ``tokenizers`` library; lossless for any text.

    Attributes and methods are those of :class:`ByteTokenizer`. Constructed by :meth:`train` or :meth:`from_json`.
    """

    def __init__(self, encoding: "tokenizers.Tokenizer", text: str) -> None:
        end_of_text = encoding.token_to_id(_END_OF_TEXT)
        if end_of_text is None:
            raise UserError(f"expected a tokenizer with the token {_END_OF_TEXT}, found none")
        encoding.encode_special_tokens = True  # the text "<|endoftext|>" in a document is ordinary text
        self._encoding, self._text = encoding, text
        self.end_of_text: int = end_of_text
        self.vocab_size: int = encoding.get_vocab_size()
        # The embedding has rows 0..vocab_size-1; tokenizers of other programs may have gaps in their numbers.
        if max(encoding.get_vocab().values()) >= self.vocab_size:
            raise UserError(f"expected a tokenizer whose tokens are 0..{self.vocab_size - 1}, found larger ones")

    @classmethod
    def train(cls, texts: Sequence[bytes], vocab_size: int) -> "BpeTokenizer":
        """Learn the merges from text.

        Args:
            texts: UTF-8 text; a few megabytes are enough.
            vocab_size: wanted number of tokens, including end of text and 256 bytes. A short text may yield fewer.

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
            # All 256 bytes, including those absent from the sample, so that any text can be encoded.
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        encoding.train_from_iterator((block for text in texts for block in _blocks(text)), trainer)
        return cls(encoding, encoding.to_str(pretty=True))

    @classmethod
    def from_json(cls, text: str) -> "BpeTokenizer":
        """Read a ``tokenizer.json``.

        Raises:
            UserError: the text is no such tokenizer, or the ``tokenizers`` library is missing.
        """
        require_bpe()
        from tokenizers import Tokenizer

        try:
            encoding = Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"expected a tokenizer of the tokenizers library, found {error}") from None
        return cls(encoding, text)

    def to_json(self) -> str:
        """The ``tokenizer.json``; after :meth:`from_json`, the very text that was read."""
        return self._text

    def encode(self, text: bytes) -> TokenArray:
        """Encode text to [tokens], in blocks of whole lines, which bounds memory and uses all cores."""
        dtype = token_dtype(self.vocab_size)
        blocks, parts = _blocks(text), [np.empty(0, dtype)]
        for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
            # The fast form omits the offsets of tokens in the text, which are not needed.
            encoded = self._encoding.encode_batch_fast(blocks[first : first + _BLOCKS_AT_ONCE])
            parts += [np.array(block.ids, dtype) for block in encoded]
        return np.concatenate(parts)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text."""
        return self._encoding.decode(list(ids), skip_special_tokens=True)


Tokenizer = ByteTokenizer | BpeTokenizer


def require_bpe() -> None:
    """Raise a ``UserError`` where the ``tokenizers`` library is missing."""
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
        # The newline byte never occurs inside a multi-byte character of UTF-8, so no character is cut.
        end = text.find(b"\n", begin + _BLOCK_BYTES) + 1 or len(text)
        blocks.append(text[begin:end].decode(errors="replace"))
        begin = end
    return blocks


def _byte_letters() -> list[str]:
    """The symbol of each byte in byte-level tokenizers: its character if visible, else one above U+00FF."""
    # The mapping of GPT-2's bytes_to_unicode, which the library uses.
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + others.index(byte)) for byte in range(256)]
