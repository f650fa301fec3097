"""Files of records: JSON lines, Parquet, Arrow files of the ``datasets`` library. A record has one text.

No file can run code: Parquet and Arrow are read by pyarrow, whose releases since 15 unpickle nothing, and of a folder
of ``datasets`` only ``state.json`` and the Arrow files that it lists.
"""

import gzip
import importlib
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeloom.errors import UserError, reason_of

DATASET_STATE = "state.json"
"""File of a folder written by ``datasets.Dataset.save_to_disk``; names its Arrow files."""
DATASET_SPLITS = "dataset_dict.json"
"""File of a folder with several of those, written by ``datasets.DatasetDict.save_to_disk``."""
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_COLUMNS = (".parquet", ".arrow")
_BATCH_ROWS = 1024


def has_records(path: Path) -> bool:
    """Whether a file contains records, by the end of its name; the others are one document each."""
    return path.name.endswith(_LINES + _COLUMNS)


def read_records(path: Path, field: str) -> Iterator[str]:
    """The text of each record of a file, in its order; blank lines between records are ignored.

    Args:
        path: with a name of :func:`has_records`.
        field: key of the text in a JSON object, or name of its column.

    Raises:
        UserError: the file is damaged, a record has no text under ``field``, or pyarrow is missing.
        OSError: the file cannot be read.
    """
    return _lines(path, field) if path.name.endswith(_LINES) else _columns(path, field)


def dataset_files(folder: Path) -> list[str] | None:
    """Names of the Arrow files of a folder written by ``save_to_disk``; ``None`` for any other folder.

    Raises:
        UserError: the list contains something else than names of Arrow files in the folder.
    """
    try:
        state = json.loads((folder / DATASET_STATE).read_bytes())
        listed = state["_data_files"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    try:
        names: list[Any] = [item["filename"] for item in listed]
    except (TypeError, KeyError):
        names = [None]
    # A name with a folder in it could lead to any file of this machine.
    wrong = [
        name for name in names if not isinstance(name, str) or Path(name).name != name or not name.endswith(".arrow")
    ]
    if wrong:
        raise UserError(
            f"{folder / DATASET_STATE} must list Arrow files of its folder, found {wrong[0]!r}; write the data set "
            "again with save_to_disk"
        )
    return names


def _lines(path: Path, field: str) -> Iterator[str]:
    number = 0
    try:
        for number, line in enumerate(_open(path), start=1):
            if line.strip():
                yield _text_of(_object(line, path, number), f"line {number} of {path}", field)
    # A stream that ends early or is damaged raises any of them, in the middle of the file.
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged behind line {number}: {error}; copy it again") from None


def _open(path: Path) -> Iterator[bytes]:
    """The lines of a file that may be compressed."""
    if path.suffix == ".zst":
        yield from _zstd_lines(path)
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def _zstd_lines(path: Path) -> Iterator[bytes]:
    arrow = _arrow("pyarrow", path)
    rest = b""
    with arrow.input_stream(str(path), compression="zstd") as stream:
        while block := _block(stream, path):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
    yield rest


def _block(stream: Any, path: Path) -> bytes:
    try:
        return stream.read(1 << 20)
    except OSError as error:
        raise UserError(f"{path} is damaged: {error}; copy it again") from None


def _object(line: bytes, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    # Nesting of thousands of brackets raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise UserError(f"line {number} of {path} must be a JSON object, found {reason_of(error)}") from None


def _columns(path: Path, field: str) -> Iterator[str]:
    arrow = _arrow("pyarrow", path)
    number = 0
    try:
        for values in _parquet(path, field) if path.suffix == ".parquet" else _stream(path, field):
            # Lengths and offsets in a damaged file could lie outside of its memory.
            values.validate(full=True)
            for value in values.to_pylist():
                number += 1
                yield _text_of({field: value}, f"row {number} of {path}", field)
    except arrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        what = (
            "a Parquet file"
            if path.suffix == ".parquet"
            else "a stream of Arrow batches, as the datasets library writes"
        )
        raise UserError(f"{path} must be {what}, found an error behind row {number}: {reason}") from None


def _parquet(path: Path, field: str) -> Iterator[Any]:
    with _arrow("pyarrow.parquet", path).ParquetFile(path) as file:
        _check_column(file.schema_arrow.names, field, path)
        for batch in file.iter_batches(_BATCH_ROWS, columns=[field]):
            yield batch.column(field)


def _stream(path: Path, field: str) -> Iterator[Any]:
    arrow = _arrow("pyarrow", path)
    # Mapped, so that the columns beside the text are not read.
    with arrow.memory_map(str(path)) as file, arrow.ipc.open_stream(file) as batches:
        _check_column(batches.schema.names, field, path)
        for batch in batches:
            yield batch.column(field)


def _check_column(names: Sequence[str], field: str, path: Path) -> None:
    if field not in names:
        raise UserError(f"{path} must have a column {field!r}, found {', '.join(names)}; set data.field to one of them")


def _text_of(record: Any, where: str, field: str) -> str:
    if isinstance(record, dict) and isinstance(record.get(field), str):
        return record[field]
    if not isinstance(record, dict):
        found = f"a value of type {type(record).__name__}"
    elif field in record:
        found = f"{record[field]!r:.40}"
    else:
        found = f"the keys {', '.join(record)}"[:200] if record else "no key"
    raise UserError(f"{where} must have a text under {field!r}, found {found}; set data.field or change the record")


def _arrow(module: str, path: Path) -> Any:
    try:
        # By name: type checkers find no types in pyarrow.
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{path} needs the pyarrow library: pip install 'pipeloom[data]'") from None
