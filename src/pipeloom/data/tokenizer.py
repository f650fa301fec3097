"""Tokenizers: bytes, byte-pair encoding trained here, and those of other programs.

All are stored as ``tokenizer.json`` in the format of the ``tokenizers`` library, which can decode their tokens. The
byte tokenizer does not need the library.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, TOKENIZER_CONFIG
from pipeloom.errors import UserError, reason_of

if TYPE_CHECKING:
    import tokenizers

TokenArray = npt.NDArray[np.int64] | npt.NDArray[np.uint32] | npt.NDArray[np.uint16]
"""Tokens, [tokens]; in the narrowest dtype for the vocabulary (``token_dtype``), or int64."""

END_OF_TEXT = "<|endoftext|>"
"""End of text of the tokenizers that pipeloom makes itself."""
# Pieces of text from which byte-pair encoding is trained.
_BLOCK_BYTES = 16 * 1024
_PART_CHARS = 1 << 20
"""Longer texts are encoded in parts of at least this size, because the library takes 100 bytes for each token."""
_CONTEXT_CHARS = 1000
"""Text on both sides of a part that is encoded with it; tokens depend on the words around them, not on more."""
_CUT = re.compile(r"(?<=\S)\n(?=\S)")
"""The best place to cut a text: tokens seldom contain a line break and the word behind it."""


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The dtype of stored tokens: uint16 if the vocabulary fits, else uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class ByteTokenizer:
    """One token per byte, and one for end of text.

    Attributes:
        vocab_size: the largest token + 1.
        begin_of_text: tokens before each document.
        end_of_text: the token after each document. No text encodes to it.
    """

    vocab_size = 257
    begin_of_text: tuple[int, ...] = ()
    end_of_text = 256

    def encode(self, text: bytes) -> TokenArray:
        """Encode UTF-8 text to [tokens], without an end-of-text token."""
        # Not uint8: end of text is 256.
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

    def encode_all(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """The tokens of each text."""
        return [self.encode(text) for text in texts]

    def encode_within(self, text: bytes, _before: bytes, _after: bytes) -> TokenArray:
        """The tokens of a part of a text, given some text on both sides."""
        return self.encode(text)

    def files(self) -> dict[str, str]:
        """The files that a run stores: name -> text."""
        return {TOKENIZER: self.to_json()}

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
            "added_tokens": [{"id": self.end_of_text, "content": END_OF_TEXT, **end}],
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


class LibraryTokenizer:
    """A tokenizer of the ``tokenizers`` library.

    Attributes and methods are those of :class:`ByteTokenizer`. Constructed by :meth:`train` or :meth:`from_files`.
    """

    def __init__(self, encoding: "tokenizers.Tokenizer", files: Mapping[str, str]) -> None:
        settings = json.loads(files.get(TOKENIZER_CONFIG, "{}"))
        name = settings.get("eos_token", END_OF_TEXT)
        end_of_text = encoding.token_to_id(name)
        if end_of_text is None:
            raise UserError(f"expected a tokenizer with the token {name}, found none")
        if getattr(encoding.model, "dropout", None):
            raise UserError("expected a tokenizer that encodes a text in one way, found model.dropout; set it to null")
        # A tokenizer for short inputs would cut documents silently.
        encoding.no_truncation()
        encoding.no_padding()
        encoding.encode_special_tokens = True  # the text "<|endoftext|>" in a document is ordinary text
        self._encoding, self._files = encoding, dict(files)
        self.end_of_text: int = end_of_text
        # Numbers of other programs may have gaps; the rows of the embedding for them stay unused.
        self.vocab_size: int = max(encoding.get_vocab().values()) + 1
        self.begin_of_text: tuple[int, ...] = _begin(encoding, settings)

    @classmethod
    def train(cls, texts: Sequence[bytes], vocab_size: int) -> "LibraryTokenizer":
        """Learn the merges of byte-level byte-pair encoding from text; it is lossless for any text.

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
        require_library("bpe")
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        encoding = Tokenizer(models.BPE())
        encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoding.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            # All 256 bytes, including those absent from the sample, so that any text can be encoded.
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        encoding.train_from_iterator((block for text in texts for block in _blocks(text)), trainer)
        return cls(encoding, {TOKENIZER: encoding.to_str(pretty=True)})

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> "LibraryTokenizer":
        """Read a ``tokenizer.json``, and the ``tokenizer_config.json`` beside it if there is one.

        Raises:
            UserError: the text is no such tokenizer, or the ``tokenizers`` library is missing.
        """
        require_library("file" if TOKENIZER_CONFIG in files else "bpe")
        from tokenizers import Tokenizer

        try:
            encoding = Tokenizer.from_str(files[TOKENIZER])
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"expected a tokenizer of the tokenizers library, found {reason_of(error)}") from None
        return cls(encoding, files)

    @property
    def rules(self) -> dict[str, Any]:
        """What makes the tokens of a text, in the form of the installed library."""
        # Versions of the library write merges in several forms. A post_processor only adds tokens around a text.
        return {key: one for key, one in json.loads(self._encoding.to_str()).items() if key != "post_processor"}

    def files(self) -> dict[str, str]:
        """The files that a run stores: name -> text; after :meth:`from_files`, the very text that was read."""
        return dict(self._files)

    def encode(self, text: bytes) -> TokenArray:
        """Encode text to [tokens]."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """The tokens of each text; uses all cores for several texts, and for the parts of a long one."""
        dtype = token_dtype(self.vocab_size)
        strings = [text.decode(errors="replace") for text in texts]
        short = [text if len(text) <= 2 * _PART_CHARS else "" for text in strings]
        # The fast form omits the offsets of tokens in the text, which only parts need.
        found = [np.array(one.ids, dtype) for one in self._encoding.encode_batch_fast(short, add_special_tokens=False)]
        return [
            ids if own or not text else self._in_parts(text, 0, len(text))
            for ids, own, text in zip(found, short, strings, strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text."""
        return self._encoding.decode(list(ids), skip_special_tokens=True)

    def encode_within(self, text: bytes, before: bytes, after: bytes) -> TokenArray:
        """The tokens of a part of a text, given some text on both sides."""
        # The context may begin and end inside a character.
        parts = [one.decode(errors="ignore") for one in (before, text, after)]
        return self._in_parts("".join(parts), len(parts[0]), len(parts[0]) + len(parts[1]))

    def encode_marked(self, text: str) -> tuple[TokenArray, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The tokens of a text that spells special tokens, and where each begins and ends, in characters."""
        self._encoding.encode_special_tokens = False
        one = self._encoding.encode(text, add_special_tokens=False)
        self._encoding.encode_special_tokens = True
        starts, stops = np.array(one.offsets, np.int64).reshape(-1, 2).T
        return np.array(one.ids, np.int64), starts, stops

    def _in_parts(self, text: str, first: int, last: int) -> TokenArray:
        """The tokens of a long text: each is of the part in which it begins, encoded with what surrounds that."""
        dtype = token_dtype(self.vocab_size)
        parts: list[npt.NDArray[Any]] = [np.empty(0, dtype)]
        for begin, end in pairwise(_cuts(text, first, last)):
            context = max(0, begin - _CONTEXT_CHARS)
            one = self._encoding.encode(text[context : end + _CONTEXT_CHARS], add_special_tokens=False)
            starts = context + np.array([start for start, _ in one.offsets], np.int64)
            parts.append(np.array(one.ids, dtype)[(starts >= begin) & (starts < end)])
        return np.concatenate(parts)


Tokenizer = ByteTokenizer | LibraryTokenizer


def tokenizer_from(files: Mapping[str, str]) -> Tokenizer:
    """The tokenizer that ``files()`` of one returned.

    Raises:
        UserError: as :meth:`LibraryTokenizer.from_files`.
    """
    of_bytes = ByteTokenizer()
    return of_bytes if dict(files) == of_bytes.files() else LibraryTokenizer.from_files(files)


def same_tokens(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two tokenizers give a text the same tokens, without those that are added at its begin and end.

    Raises:
        UserError: as :meth:`LibraryTokenizer.from_files`.
    """
    if one[TOKENIZER] == other[TOKENIZER]:
        return True
    return LibraryTokenizer.from_files(one).rules == LibraryTokenizer.from_files(other).rules


def sha256_of(files: Mapping[str, str]) -> str:
    """SHA-256 of the files of a tokenizer, as hexadecimal digits."""
    return hashlib.sha256("".join(files[name] for name in sorted(files, reverse=True)).encode()).hexdigest()


def require_library(tokenizer: str) -> None:
    """Raise a ``UserError`` where the ``tokenizers`` library is missing."""
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"tokenizer {tokenizer} needs the tokenizers library: pip install 'pipeloom[bpe]', or set data.tokenizer "
            "to bytes"
        ) from error


def _begin(encoding: "tokenizers.Tokenizer", settings: Mapping[str, object]) -> tuple[int, ...]:
    """The tokens that a tokenizer puts before a text, such as ``<|begin_of_text|>``."""
    adds, name = settings.get("add_bos_token"), settings.get("bos_token")
    # transformers lets this setting override what tokenizer.json does.
    if adds is not None:
        begin = encoding.token_to_id(name) if adds and isinstance(name, str) else None
        return () if begin is None else (begin,)
    plain, whole = (encoding.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    first = next((place for place in range(len(whole)) if whole[place : place + len(plain)] == plain), 0)
    return tuple(whole[:first])


def _cuts(text: str, begin: int, end: int) -> list[int]:
    """Begin and end of a text, and the places between where it is cut."""
    cuts = [begin]
    while end - cuts[-1] > 2 * _PART_CHARS:
        place = cuts[-1] + _PART_CHARS
        found = _CUT.search(text, place, place + _PART_CHARS)
        cuts.append(place if found is None else found.end())
    return [*cuts, end]


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
