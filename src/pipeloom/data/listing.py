"""Lists the files of a corpus, without folders that this program wrote."""

import os
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from pipeloom.data.corpus import Source, refuse_unreadable
from pipeloom.data.own_folders import own_kind
from pipeloom.data.records import DATASET_SPLITS, dataset_files

# Not sources of Python's standard library: bytecode, and installed packages, which differ between hosts.
_NO_SOURCES = frozenset({"__pycache__", "site-packages", "dist-packages"})


class Listing(NamedTuple):
    """The files of a corpus.

    Attributes:
        sources: sorted by name.
        left_out: folders that this program wrote, each with what it is, such as ``runs/1 (a run)``; sorted.
    """

    sources: list[Source]
    left_out: tuple[str, ...]


def list_sources(path: Path | None, cache: Path | None = None) -> Listing:
    """The files of a corpus; hidden files and folders are left out, and folders below it that this program wrote.

    Args:
        path: a file, or a folder of files. None: the ``*.py`` files of the running Python's standard library.
        cache: the folder of tokenized texts, left out, too.

    Raises:
        UserError: there is no such file or folder, or it cannot be read.
    """
    # By default, text that every machine has: a first run needs no download.
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    left_out: list[str] = []
    found = _walk(root, cache, left_out) if root.is_dir() else iter([root])
    wanted = (file for file in found if path is not None or file.suffix == ".py")
    try:
        sources = [_source(file, root) for file in wanted]
    except OSError as error:
        refuse_unreadable(root, error)
    # File systems list folders in any order, and the order of documents changes the tokens.
    by_name = sorted((source for source in sources if source is not None), key=lambda source: source.name)
    return Listing(by_name, tuple(sorted(left_out)))


def _walk(root: Path, cache: Path | None, left_out: list[str]) -> Iterator[Path]:
    """Every file below a folder, without hidden ones, installed packages, bytecode, and what this program wrote."""

    def fail(error: OSError) -> NoReturn:
        raise error

    here, there = root.resolve(), None if cache is None else cache.resolve()
    below = root / there.relative_to(here) if there is not None and there.is_relative_to(here) else None
    # Without onerror, os.walk silently skips folders that it cannot read.
    for name, folders, files in os.walk(root, onerror=fail):
        folder = Path(name)
        # A run, an export or the cache in the folder of its text would change the text while the run reads it. The
        # folder that the user names is text, whatever is in it.
        kind = "the cache" if folder == below else own_kind(folder, {*folders, *files})
        if kind is not None and folder != root:
            left_out.append(f"{folder} ({kind})")
            folders.clear()
            continue
        # In place: os.walk descends into the folders left in this list.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NO_SOURCES]
        # A folder of the datasets library has files that describe the data set beside its records.
        listed = dataset_files(folder)
        wanted = [name for name in files if name != DATASET_SPLITS] if listed is None else listed
        yield from (folder / name for name in wanted if not name.startswith("."))


def _source(file: Path, root: Path) -> Source | None:
    """A file's entry; None if it is no regular file, or a broken link."""
    # A broken link inside a folder is skipped; given as the corpus itself it is an error, which stat raises.
    try:
        status = file.stat()
    except OSError:
        if file == root or file.exists():
            raise
        return None
    name = file.name if file == root else file.relative_to(root).as_posix()
    return Source(name, file, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
