"""Files of records: JSON lines, Parquet, Arrow files of the ``datasets`` library. A record has one text.

No file can run code: Parquet and Arrow are read by pyarrow, whose releases since 15 unpickle nothing, and of a folder
of ``datasets`` only ``state.json`` and the Arrow files that it lists.
"""

import gzip
import importlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeloom.data.answers import KEYS, exchange_of, wrong_exchange
from pipeloom.errors import UserError, reason_of
from pipeloom.system.files import parse_json, read_text

DATASET_STATE = "state.json"
"""File of a folder written by ``datasets.Dataset.save_to_disk``; names its Arrow files."""
DATASET_SPLITS = "dataset_dict.json"
"""File of a folder with several of those, written by ``datasets.DatasetDict.save_to_disk``."""
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_COLUMNS = (".parquet", ".arrow")
_BATCH_ROWS = 1024
_LOOK_ON, _MOST_NAMED = 1000, 10
"""Records behind a wrong one of which the others are counted, and how many of them are named."""
_USUAL = "text"
"""The default of data.field; records without it may have an answer."""


def has_records(path: Path) -> bool:
    """Whether a file contains records, by the end of its name; the others are one document each."""
    return path.name.endswith(_LINES + _COLUMNS)


def is_divisible(path: Path) -> bool:
    """Whether parts of a file can be read, each from the beginning of a line to the end of one."""
    return path.name.endswith(_LINES[0])


def read_records(path: Path, field: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The text of each record of a file, in its order; blank lines between records are ignored.

    Records without the usual field that have an answer (``pipeloom.data.answers``) are exchanges.

    Args:
        path: with a name of :func:`has_records`.
        field: key of the text in a JSON object, or name of its column.
        begin: first byte, of a file that :func:`is_divisible`.
        end: the byte behind the last one; ``None`` for the whole file.

    Raises:
        UserError: the file is damaged, a record has no text under ``field``, or pyarrow is missing.
        OSError: the file cannot be read.
    """
    return _lines(path, field, begin, end) if path.name.endswith(_LINES) else _columns(path, field)


def dataset_files(folder: Path) -> list[str] | None:
    """Names of the Arrow files of a folder written by ``save_to_disk``; ``None`` for any other folder.

    Raises:
        UserError: the list contains something else than names of Arrow files in the folder.
    """
    state = folder / DATASET_STATE
    if not state.is_file():
        return None
    try:
        listed = parse_json(read_text(state))["_data_files"]
    except (UserError, TypeError, KeyError):
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
            f"{state} must list Arrow files of its folder, found {wrong[0]!r}; write the data set "
            "again with save_to_disk"
        )
    return names


def _lines(path: Path, field: str, begin: int, end: int | None) -> Iterator[bytes]:
    number = 0

    def records() -> Iterator[tuple[int, Any]]:
        nonlocal number
        for number, line in enumerate(_open(path, begin, end), start=1):
            if line.strip():
                yield number, _object(line)

    try:
        # Only for a message the lines before this part are counted.
        yield from _contents(records(), field, "line", path, lambda: _lines_before(path, begin))
    # A stream that ends early or is damaged raises any of them, in the middle of the file.
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged behind line {number}: {error}; copy it again") from None


def _lines_before(path: Path, begin: int) -> int:
    with path.open("rb") as file:
        return sum(file.read(min(1 << 20, begin - at)).count(b"\n") for at in range(0, begin, 1 << 20))


def _open(path: Path, begin: int, end: int | None) -> Iterator[bytes]:
    """The lines of a file that may be compressed, or of a part of it."""
    if path.suffix == ".zst":
        yield from _zstd_lines(path)
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        file.seek(begin)
        for line in file:
            yield line
            begin += len(line)
            if begin == end:
                return


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


def _object(line: bytes) -> Any:
    """The object of a line, or the error that it is."""
    try:
        return json.loads(line)
    # Nesting of thousands of brackets raises RecursionError.
    except (ValueError, RecursionError) as error:
        return error


def _columns(path: Path, field: str) -> Iterator[bytes]:
    arrow = _arrow("pyarrow", path)
    number = 0

    def records() -> Iterator[tuple[int, Any]]:
        nonlocal number
        for values in _parquet(path, field) if path.suffix == ".parquet" else _stream(path, field):
            # Lengths and offsets in a damaged file could lie outside of its memory.
            values.validate(full=True)
            for record in values.to_pylist():
                number += 1
                yield number, record

    try:
        yield from _contents(records(), field, "row", path)
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
        yield from file.iter_batches(_BATCH_ROWS, columns=_columns_of(file.schema_arrow.names, field, path))


def _stream(path: Path, field: str) -> Iterator[Any]:
    arrow = _arrow("pyarrow", path)
    # Mapped, so that the columns beside the text are not read.
    with arrow.memory_map(str(path)) as file, arrow.ipc.open_stream(file) as batches:
        columns = _columns_of(batches.schema.names, field, path)
        for batch in batches:
            yield batch.select(columns)


def _columns_of(names: Sequence[str], field: str, path: Path) -> list[str]:
    """The columns that are read: that of the text, or those of an exchange."""
    wanted = [(field,), *(KEYS if field == _USUAL else ())]
    found = next((keys for keys in wanted if set(keys) <= set(names)), None)
    if found is None:
        raise UserError(f"{path} must have a column {field!r}, found {', '.join(names)}; set data.field to one of them")
    return list(found)


def _contents(
    records: Iterator[tuple[int, Any]], field: str, unit: str, path: Path, before: Callable[[], int] = lambda: 0
) -> Iterator[bytes]:
    """The content of each record. Of wrong ones, the first is described, and those behind it are counted.

    Args:
        records: with their numbers.
        field: of the text.
        unit: what the numbers count.
        path: of the file.
        before: returns the number of units before the first, for a message.
    """
    wrong: list[int] = []
    begin, message = 0, ""
    for number, record in records:
        if (found := _content(record, field)) is None:
            if not wrong:
                begin = before()
                message = _no_text(record, f"{unit} {begin + number} of {path}", field)
            wrong.append(begin + number)
        elif not wrong:
            yield found
        # Not to the end of the file, which may take hours.
        if wrong and begin + number >= wrong[0] + _LOOK_ON:
            break
    if len(wrong) > 1:
        named = ", ".join(map(str, wrong[1 : _MOST_NAMED + 1])) + (", ..." if len(wrong) > _MOST_NAMED + 1 else "")
        message += f"; {len(wrong) - 1:,} more of the {_LOOK_ON:,} {unit}s behind it are wrong: {named}"
    if wrong:
        raise UserError(message)


def _content(record: Any, field: str) -> bytes | None:
    """The text of a record, or its exchange; ``None`` if it has neither."""
    if not isinstance(record, dict):
        return None
    if isinstance(record.get(field), str):
        # JSON may contain halves of surrogate pairs, which are no UTF-8: is_text refuses what this writes for them.
        return record[field].encode(errors="surrogatepass")
    return exchange_of(record) if field == _USUAL and field not in record else None


def _no_text(record: Any, where: str, field: str) -> str:
    if isinstance(record, json.JSONDecodeError):
        # Its own text has the number of a line, which is always 1 here.
        return f"{where} must be a JSON object, found an error at character {record.colno}: {record.msg}"
    if isinstance(record, Exception):
        return f"{where} must be a JSON object, found {reason_of(record)}"
    if not isinstance(record, dict):
        found = f"a value of type {type(record).__name__}"
    elif field == _USUAL and field not in record and (wrong := wrong_exchange(record)) is not None:
        return f"{where} must have {wrong}; change the record"
    elif field in record:
        found = f"{record[field]!r:.40}"
    else:
        found = f"the keys {', '.join(record)}"[:200] if record else "no key"
    return f"{where} must have a text under {field!r}, found {found}; set data.field or change the record"


def _arrow(module: str, path: Path) -> Any:
    try:
        # By name: type checkers find no types in pyarrow.
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{path} needs the pyarrow library: pip install 'pipeloom[data]'") from None
