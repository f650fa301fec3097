"""The text: where it is, what is in it, and which of it is kept for validation."""

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pipeloom.errors import UserError

# Below Python's standard library these are not its text: bytecode, and packages that differ from host to host.
_NO_SOURCES = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class Source:
    """A file of the corpus, not read yet.

    Attributes:
        name: path below the corpus's root, with forward slashes.
        path: where it is.
        num_bytes: its size.
        mtime_ns: when it was last written, nanoseconds since 1970.
    """

    name: str
    path: Path
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Document:
    """A file's text.

    Attributes:
        name: as in :class:`Source`.
        content: valid UTF-8 without NUL; not empty.
    """

    name: str
    content: bytes


def list_sources(path: Path | None) -> list[Source]:
    """The files of a corpus, sorted by name; hidden files and folders are left out.

    Args:
        path: a file, or a folder of them. None: the ``*.py`` files of the running Python's standard library.

    Raises:
        UserError: there is no such file or folder, or it cannot be read.
    """
    # Text that every machine has: a first run needs no download.
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    found = _walk(root) if root.is_dir() else iter([root])
    wanted = (file for file in found if path is not None or file.suffix == ".py")
    try:
        sources = [_source(file, root) for file in wanted]
    except OSError as error:
        _fail(root, error)
    # File systems list folders in any order; the order of the documents is part of the tokens.
    return sorted((source for source in sources if source is not None), key=lambda source: source.name)


def read_documents(sources: Sequence[Source]) -> list[Document]:
    """The text of those files that are text: they decode as UTF-8, have no NUL and are not empty.

    Raises:
        UserError: a file cannot be read, or none is text.
    """
    documents = []
    for source in sources:
        try:
            content = source.path.read_bytes()
        except OSError as error:
            _fail(source.path, error)
        if _is_text(content):
            documents.append(Document(source.name, content))
    if not documents:
        raise UserError(
            f"the corpus must have at least one UTF-8 text file that is not empty, found none in {len(sources)} files; "
            "set data.path to a text file or a folder of them"
        )
    return documents


def fingerprint(documents: Sequence[Document]) -> str:
    """SHA-256 of the names and contents of all documents, as hexadecimal digits."""
    total = hashlib.sha256()
    for document in documents:
        # A hash of lines, as sha256sum writes them: a boundary between two files cannot move without changing it.
        total.update(f"{hashlib.sha256(document.content).hexdigest()}  {document.name}\n".encode())
    return total.hexdigest()


def shuffled(documents: Sequence[Document]) -> list[Document]:
    """The documents in an order that looks random and depends on their names only."""
    # By a hash and not by a seeded shuffle: a document that is added leaves the order of the others as it was.
    return sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())


def split_documents(documents: Sequence[Document], validation_fraction: float) -> tuple[list[Document], list[Document]]:
    """Keep whole documents for validation: a share of the bytes, 0..1.

    Documents are taken in the order of :func:`shuffled`, each if it still fits into the wanted share of the bytes.

    Returns:
        Training and validation documents, each in the order of the corpus. The second list is empty if no choice of
        this kind comes to half of the wanted share: too few documents, or one that is most of the text.
    """
    budget = validation_fraction * sum(len(document.content) for document in documents)
    kept, left = set(), budget
    for document in shuffled(documents):
        # Whole documents: a cut one would have its beginning in the training text, and validation would be too easy.
        if len(document.content) <= left:
            kept.add(document.name)
            left -= len(document.content)
    # The caller then cuts the tokens: half of the wanted share is still a validation, a few bytes are none.
    if left > budget / 2:
        kept = set()
    training = [document for document in documents if document.name not in kept]
    return training, [document for document in documents if document.name in kept]


def _walk(root: Path) -> Iterator[Path]:
    """Every file below a folder that is not hidden; installed packages and bytecode are left out."""

    def fail(error: OSError) -> NoReturn:
        raise error

    # Without onerror, os.walk skips folders that it cannot read, and the run would train on less text.
    for folder, folders, files in os.walk(root, onerror=fail):
        # In place: os.walk goes on into what is left in this list.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NO_SOURCES]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _source(file: Path, root: Path) -> Source | None:
    """A file's entry; None for what is not a regular file (or leads nowhere)."""
    # A broken link in a folder is not text; as the corpus itself it is an error, which stat raises.
    if file != root and not file.exists():
        return None
    status = file.stat()
    name = file.name if file == root else file.relative_to(root).as_posix()
    return Source(name, file, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _is_text(content: bytes) -> bool:
    if not content or b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _fail(path: Path, error: OSError) -> NoReturn:
    raise UserError(
        f"the corpus must be a text file or a folder of them that can be read, found {error.strerror} at {path}; "
        "change data.path or the file's permissions"
    ) from error
