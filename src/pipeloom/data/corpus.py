"""The corpus: lists and reads files of text and of records, and splits them into training and validation."""

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pipeloom.data.records import DATASET_SPLITS, dataset_files, has_records, read_records
from pipeloom.errors import UserError

# Not sources of Python's standard library: bytecode, and installed packages, which differ between hosts.
_NO_SOURCES = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class Source:
    """A file of the corpus, not read yet.

    Attributes:
        name: path relative to the corpus's root, with forward slashes.
        path: of the file.
        num_bytes: its size.
        mtime_ns: modification time, nanoseconds since 1970.
    """

    name: str
    path: Path
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Document:
    """The text of a file, or of a record.

    Attributes:
        name: as in :class:`Source`; of a record with its number behind it, such as ``part.jsonl/12``.
        content: valid UTF-8 without NUL; not empty.
    """

    name: str
    content: bytes


def list_sources(path: Path | None) -> list[Source]:
    """The files of a corpus, sorted by name; hidden files and folders are left out.

    Args:
        path: a file, or a folder of files. None: the ``*.py`` files of the running Python's standard library.

    Raises:
        UserError: there is no such file or folder, or it cannot be read.
    """
    # By default, text that every machine has: a first run needs no download.
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    found = _walk(root) if root.is_dir() else iter([root])
    wanted = (file for file in found if path is not None or file.suffix == ".py")
    try:
        sources = [_source(file, root) for file in wanted]
    except OSError as error:
        _fail(root, error)
    # File systems list folders in any order, and the order of documents changes the tokens.
    return sorted((source for source in sources if source is not None), key=lambda source: source.name)


def read_documents(sources: Sequence[Source], field: str = "text") -> tuple[list[Document], int]:
    """Read those files and records that are text: valid UTF-8 without NUL, not empty.

    Args:
        sources: the files.
        field: name of the text in records.

    Returns:
        Documents, and the number of files and records that are not text.

    Raises:
        UserError: a file cannot be read, a record has no such field, or nothing is text.
    """
    documents: list[Document] = []
    num_skipped = 0
    for source in sources:
        try:
            for name, content in _contents(source, field):
                if _is_text(content):
                    documents.append(Document(name, content))
                else:
                    num_skipped += 1
        except OSError as error:
            _fail(source.path, error)
    if not documents:
        raise UserError(
            f"the corpus must have at least one UTF-8 text that is not empty, found none in {len(sources)} files; "
            "set data.path to a file of text or of records, or a folder of them"
        )
    return documents, num_skipped


def _contents(source: Source, field: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the documents of a file."""
    if not has_records(source.path):
        yield source.name, source.path.read_bytes()
        return
    for number, text in enumerate(read_records(source.path, field), start=1):
        # JSON may contain halves of surrogate pairs, which are no UTF-8: _is_text refuses what this writes for them.
        yield f"{source.name}/{number}", text.encode(errors="surrogatepass")


def fingerprint(documents: Sequence[Document]) -> str:
    """SHA-256 of the names and contents of all documents, as hexadecimal digits."""
    total = hashlib.sha256()
    for document in documents:
        # A hash of lines in the form of sha256sum, so that it changes if a boundary between two files moves.
        total.update(f"{hashlib.sha256(document.content).hexdigest()}  {document.name}\n".encode())
    return total.hexdigest()


def shuffled(documents: Sequence[Document]) -> list[Document]:
    """The documents in a pseudo-random order that depends on their names only."""
    # Sorted by a hash instead of shuffled: adding a document keeps the order of the others.
    return sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())


def split_documents(documents: Sequence[Document], validation_fraction: float) -> tuple[list[Document], list[Document]]:
    """Hold out whole documents for validation, up to a fraction of the bytes, 0..1.

    Documents are taken in the order of :func:`shuffled`, each if it still fits into the fraction.

    Returns:
        Training and validation documents, each in the order of the corpus. The second list is empty if the documents
        that fit have less than half of the fraction: there are too few, or one is most of the text.
    """
    budget = validation_fraction * sum(len(document.content) for document in documents)
    kept, left = set(), budget
    for document in shuffled(documents):
        # Whole documents: with the beginning of a document in the training text, validation would be too easy.
        if len(document.content) <= left:
            kept.add(document.name)
            left -= len(document.content)
    # The caller then splits the tokens instead. Half of the fraction is enough for validation, a few bytes are not.
    if left > budget / 2:
        kept = set()
    training = [document for document in documents if document.name not in kept]
    return training, [document for document in documents if document.name in kept]


def _walk(root: Path) -> Iterator[Path]:
    """Every file below a folder, without hidden ones, installed packages and bytecode."""

    def fail(error: OSError) -> NoReturn:
        raise error

    # Without onerror, os.walk silently skips folders that it cannot read.
    for folder, folders, files in os.walk(root, onerror=fail):
        # In place: os.walk descends into the folders left in this list.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NO_SOURCES]
        # A folder of the datasets library has files that describe the data set beside its records.
        listed = dataset_files(Path(folder))
        wanted = [name for name in files if name != DATASET_SPLITS] if listed is None else listed
        yield from (Path(folder, name) for name in wanted if not name.startswith("."))


def _source(file: Path, root: Path) -> Source | None:
    """A file's entry; None if it is no regular file, or a broken link."""
    # A broken link inside a folder is skipped; given as the corpus itself it is an error, which stat raises.
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
        f"the corpus must be a file or a folder of files that can be read, found {error.strerror or error} at {path}; "
        "change data.path or the file's permissions"
    ) from error
