"""Folders of checkpoints, their descriptions, and checks for damage; without the tensors.

    RUN/checkpoints/step-000100/
        checkpoint.json     ``CheckpointInfo``; size and SHA-256 of every other file; its own SHA-256
        tokenizer.json      in the format of the tokenizers library; beside it tokenizer_config.json, if it was given
        pretrained.json     the Hugging Face folder that the run started from: its texts, and its tensors by file
        .metadata           of torch.distributed.checkpoint: the file and offset of every chunk of every tensor
        __0_0.distcp, ...   chunks, files by rank

A checkpoint is written under a hidden name and then renamed, so one with its final name is complete.
"""

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipeloom.errors import UserError, reason_of
from pipeloom.system.files import parse_json, read_text, sealed

RUN_FILE = "config.toml"
"""Run file of a run folder."""
FOLDER = "checkpoints"
ACTIONS = "actions"
"""Folder in a run folder with what each rank did last (``pipeloom.runs.action_log``)."""
DRAFTS = ".starting"
"""Folder in a run folder with the files of a run before the end of its first step."""
INFO = "checkpoint.json"
METADATA = ".metadata"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
"""Names the end-of-text token of a tokenizer that another program made; with more in the format of Hugging Face."""
ORIGIN = "pretrained.json"
UNCHECKED = "written without hashes of its files, so damage cannot be detected"
"""Note about a checkpoint for which ``can_be_checked`` is false."""
_FORMAT = 2
_UNCHECKED_FORMAT = 1
"""Without sizes and hashes of files."""
_PREFIX = "step-"
_READERS = 8
"""Number of files read in parallel; hashing releases the GIL."""
_SETTLED_S = 2.0
"""A file modified less than this long ago may change again without a change of its mtime (coarse clocks)."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredFile:
    """Size and hash of a file of a checkpoint.

    Attributes:
        num_bytes: its size.
        sha256: of its content, as hexadecimal digits.
    """

    num_bytes: int
    sha256: str


Cause = Literal["steps", "clock", "signal", "end"]
"""Why a checkpoint was written: ``checkpoint.every`` steps, ``checkpoint.every_s`` seconds, a signal, or the last
step."""


@dataclass(frozen=True)
class CheckpointInfo:
    """Description of a checkpoint.

    Attributes:
        step: optimizer steps done.
        sequences: read in these steps, over all replicas; the next batch begins after them.
        tokens: in these sequences.
        model: sizes of the model, with the names of ``ModelConfig``.
        data: settings that determine the order of the batches.
        layout: that wrote it; any layout can read it.
        versions: of pipeloom and torch, by name.
        cause: why it was written.
        sources: of several texts, what was read of each (``pipeloom.data.windows``); empty for one.
        adapter: of the weights, with the names of ``Adapter``; ``None`` for none.
        base: folder of Hugging Face that the weights without adapters are from, as the run's file has it; ``None`` for
            another start.
    """

    step: int
    sequences: int
    tokens: int
    model: dict[str, Any]
    data: dict[str, Any]
    layout: dict[str, Any]
    versions: dict[str, str]
    cause: Cause = "steps"
    sources: list[dict[str, Any]] = field(default_factory=list)
    adapter: dict[str, Any] | None = None
    base: str | None = None


def name_of(step: int) -> str:
    """Name of a checkpoint's folder in ``checkpoints/``."""
    # Zero-padded, so that names sort by step in a listing.
    return f"{_PREFIX}{step:06}"


def draft_of(path: Path) -> Path:
    """The folder that a checkpoint is written to before it is complete."""
    # Hidden, and in the same folder: a rename is atomic only within one file system.
    return path.with_name(f".{path.name}.part")


def list_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest step first."""
    return [path for path in step_folders(run) if not missing_files(path)]


def step_folders(run: Path) -> list[Path]:
    """The folders of a run that are named as checkpoints, complete or not, oldest step first."""
    found = [path for path in (run / FOLDER).glob(f"{_PREFIX}*") if step_of(path) is not None]
    # By number: from a million steps on, names are longer and no longer sort by step.
    return sorted(found, key=lambda path: step_of(path) or 0)


def step_of(checkpoint: Path) -> int | None:
    """The step in a folder's name; ``None`` if it is no name of a checkpoint."""
    prefix, digits = checkpoint.name[: len(_PREFIX)], checkpoint.name[len(_PREFIX) :]
    return int(digits) if prefix == _PREFIX and digits.isdecimal() else None


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, perhaps an incomplete one, rather than a run folder."""
    return (path / INFO).exists() or (path / METADATA).exists()


def among_checkpoints(path: Path) -> str | None:
    """Why nothing else may be written to a folder: it is, or is in, one that a run removes, or a checkpoint.

    Returns:
        A sentence; ``None`` for any other folder, which need not exist.
    """
    own = path.resolve()
    for one in (own, *own.parents):
        if not missing_files(one):
            return f"{path} must be outside of {one}, which is a checkpoint; choose another folder"
        if one.name == FOLDER and list_checkpoints(one.parent):
            return f"{path} must be outside of {one}, where a run has its checkpoints; choose another folder"
        if one.name in (ACTIONS, DRAFTS) and (one.parent / RUN_FILE).exists():
            return f"{path} must be outside of {one}, which a run removes; choose another folder"
    return None


def is_hugging_face(path: Path) -> bool:
    """Whether a folder has the model and the weights of a Hugging Face model, in any format, and is no run."""
    try:
        # Weights may have been exported into a run folder; those of its checkpoints are newer after it resumed.
        return (path / "config.json").is_file() and not list_checkpoints(path)
    except OSError:  # such as a name that is too long
        return False


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that contains a checkpoint; ``None`` if it was moved elsewhere."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == FOLDER else None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at a path, or the latest complete one of a run folder.

    Raises:
        UserError: there is none, or it is not complete.
    """
    try:
        found = "" if path.is_dir() else "a file" if path.exists() else "nothing"
    except OSError as error:  # such as a name that is too long
        raise UserError(f"expected a run folder or a checkpoint, cannot read {path}: {reason_of(error)}") from None
    if found:
        raise UserError(f"expected a run folder or a checkpoint, found {found} at {path}")
    # First, because a checkpoint that was copied elsewhere is in no run folder.
    if is_checkpoint(path):
        missing = missing_files(path)
        if missing:
            raise UserError(f"the checkpoint {path} is not complete: it lacks {' and '.join(missing)}; use another one")
        return path
    complete = list_checkpoints(path)
    if not complete:
        drafts = sorted(draft.name for draft in (path / FOLDER).glob(f".{_PREFIX}*.part"))
        begun = f", only {', '.join(drafts)}, which was not completed" if drafts else ""
        raise UserError(f"expected a run folder or a checkpoint, found no complete checkpoint in {path}{begun}")
    return complete[-1]


def find_weights(path: Path) -> Path:
    """A Hugging Face folder as it is, or the checkpoint that ``find_checkpoint`` returns.

    Raises:
        UserError: as ``find_checkpoint``.
    """
    if is_hugging_face(path):
        return path
    try:
        return find_checkpoint(path)
    except UserError as error:
        raise UserError(f"{error}, and no config.json of a Hugging Face model") from None


def missing_files(checkpoint: Path) -> list[str]:
    """Names of missing files without which a checkpoint is incomplete."""
    return [name for name in (METADATA, INFO) if not (checkpoint / name).is_file()]


def read_info(checkpoint: Path) -> CheckpointInfo:
    """The description of a complete checkpoint.

    Raises:
        UserError: it cannot be read, was changed after it was written, or has the format of another version.
    """
    return _read(checkpoint)[0]


def read_tokenizer(checkpoint: Path) -> dict[str, str] | None:
    """The files of a complete checkpoint's tokenizer, name -> text; ``None`` for checkpoints of older versions.

    Raises:
        UserError: one cannot be read, or was changed after it was written.
    """
    found = {name: text for name in (TOKENIZER, TOKENIZER_CONFIG) if (text := _read_text(checkpoint, name)) is not None}
    return found or None


def read_origin(checkpoint: Path) -> str | None:
    """The description of the Hugging Face folder that a run started from, as JSON; ``None`` for other runs.

    Raises:
        UserError: it cannot be read, or was changed after it was written.
    """
    return _read_text(checkpoint, ORIGIN)


def _read_text(checkpoint: Path, name: str) -> str | None:
    """The text of a file of a complete checkpoint; ``None`` if the checkpoint has no such file."""
    files = _read(checkpoint)[1] or {}
    if name not in files:
        return None
    file = checkpoint / name
    problem = _wrong_size(file, files[name]) or _wrong_content(file, files[name])
    if problem is not None:
        raise UserError(f"{problem}; use another checkpoint")
    return file.read_text(encoding="utf-8")


def write_info(checkpoint: Path, info: CheckpointInfo, files: Mapping[str, StoredFile]) -> None:
    """Write and fsync the description of a checkpoint, with sizes and hashes of its other files.

    Raises:
        OSError: it cannot be written.
    """
    listed = {name: asdict(files[name]) for name in sorted(files)}
    write_synced(checkpoint / INFO, sealed({"format": _FORMAT, **asdict(info), "files": listed}))


def write_synced(file: Path, text: str) -> None:
    """Write and fsync a text.

    Raises:
        OSError: it cannot be written.
    """
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        # The rename that follows marks the checkpoint as complete; without fsync a crash could leave an empty file.
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, where the system can: Windows cannot open folders.

    Raises:
        OSError: the disk reports an error.
    """
    if os.name == "nt":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        # Some network file systems have no fsync of folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def measure(files: Iterable[Path]) -> dict[str, StoredFile]:
    """Size and hash of each file, by name.

    Raises:
        OSError: one cannot be read.
    """
    return {file.name: found for file, found in _at_once(_measured, list(files))}


def can_be_checked(checkpoint: Path) -> bool:
    """Whether a checkpoint contains the hashes of its files; those of older versions do not.

    Raises:
        UserError: as ``read_info``.
    """
    return _read(checkpoint)[1] is not None


def damage(checkpoint: Path, share: int = 0, num_shares: int = 1) -> list[str]:
    """Find damaged files of a complete checkpoint, by size and hash.

    Hashes are cached in the process and the processes that it forks; a file with unchanged inode, size and times is not
    read again.

    Args:
        checkpoint: its folder.
        share: the share of the files to hash, 0..num_shares-1, if several processes divide the work. Sizes are always
            compared for all files.
        num_shares: number of shares.

    Returns:
        A sentence about each file that is missing, truncated or changed; if sizes are wrong, nothing is hashed. Empty
        for an undamaged checkpoint, and if ``can_be_checked`` is false.
    """
    try:
        files = _read(checkpoint)[1] or {}
    except UserError as error:
        return [str(error)]
    problems = [problem for name, one in files.items() if (problem := _wrong_size(checkpoint / name, one)) is not None]
    # Comparing sizes costs nothing, and a file of a wrong size cannot have the right hash.
    if problems:
        return problems
    # Largest first, round robin: each process gets about as many bytes.
    by_size = sorted(files, key=lambda name: (-files[name].num_bytes, name))
    mine = [checkpoint / name for name in by_size[share::num_shares]]
    checked = _at_once(lambda file: _wrong_content(file, files[file.name]), mine)
    return sorted(problem for _, problem in checked if problem is not None)


def _read(checkpoint: Path) -> tuple[CheckpointInfo, dict[str, StoredFile] | None]:
    """The description of a checkpoint and its files; ``None`` for the files in the older format."""
    path = checkpoint / INFO
    text = read_text(path)
    try:
        tree = parse_json(text)
        found = tree.pop("format", None) if isinstance(tree, dict) else None
        if found not in (_FORMAT, _UNCHECKED_FORMAT):
            raise UserError(f"expected a checkpoint of format {_UNCHECKED_FORMAT} or {_FORMAT}")
        if found == _UNCHECKED_FORMAT:
            # Format 1 stays readable; it has no hashes to compare.
            return CheckpointInfo(**tree), None
        tree.pop("sha256", None)
        # The whole text is compared, including spaces and the order of keys.
        if text != sealed({"format": found, **tree}):
            raise UserError("it was changed after it was written (its hash differs); use another checkpoint")
        files = {_plain(name): StoredFile(**one) for name, one in dict(tree.pop("files", {})).items()}
        return CheckpointInfo(**tree), files
    except (ValueError, TypeError) as error:  # a UserError is a ValueError
        raise UserError(f"cannot read {path}: {reason_of(error)}") from error


def _plain(name: str) -> str:
    """Refuse a name with a folder in it, with which the check could read any file of the host."""
    if Path(name).name != name:
        raise UserError(f"expected names of files in its folder, found {name!r}")
    return name


def _at_once(work: Callable[[Path], _T], files: list[Path]) -> list[tuple[Path, _T]]:
    """Each file with what ``work`` returns for it."""
    with ThreadPoolExecutor(_READERS) as pool:
        return list(zip(files, pool.map(work, files), strict=True))


def _measured(path: Path) -> StoredFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(file.tell(), digest)


@lru_cache(maxsize=1 << 16)
def _measured_once(path: Path, *_: int) -> StoredFile:  # the other arguments are the key of the cache
    return _measured(path)


def _wrong_size(file: Path, stored: StoredFile) -> str | None:
    """A sentence about a file that is missing or has another size."""
    if not file.is_file():
        return f"{file} is missing"
    found = file.stat().st_size
    if found == stored.num_bytes:
        return None
    what = "truncated" if found < stored.num_bytes else "too long"
    return f"{file} is {what}: {found:,} bytes, {stored.num_bytes:,} were written"


def _wrong_content(file: Path, stored: StoredFile) -> str | None:
    """A sentence about a file whose content has changed."""
    try:
        facts = file.stat()
        is_settled = time.time() - max(facts.st_mtime, facts.st_ctime) > _SETTLED_S
        # Inode and ctime too: a copied or restored file may keep its size and mtime.
        version = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        found = _measured_once(file.absolute(), *version) if is_settled else _measured(file)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return None if found == stored else f"{file} was changed after it was written: its SHA-256 differs"
