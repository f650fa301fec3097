"""Storage reader and writer for torch.distributed.checkpoint (DCP): safe to read, and reproducible byte by byte.

DCP describes a checkpoint in ``.metadata``, a pickle, and unpickling may call any function. The reader here admits only
the classes of such a description. Tensors are read by ``torch.load`` with ``weights_only``, which has an allow-list of
its own.
"""

import pickle
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem, metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipeloom.checkpoint.checkpoint_folder import METADATA
from pipeloom.errors import UserError
from pipeloom.runs.action_log import NOTHING, Activity

_CLASSES = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_PATHS = {
    name: pure
    for pure, kinds in ((PurePosixPath, ("PosixPath", "PurePosixPath")), (PureWindowsPath, ("WindowsPath",)))
    for name in kinds
}
"""Classes of the path that DCP's own writer stores. Pure paths, which cannot access files, take their place."""


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint without DCP's UUID and path, so that equal checkpoints have equal files.

    Args:
        path: the folder.
        activity: what writing this rank's files is noted as.
    """

    def __init__(self, path: Path, activity: Activity = NOTHING) -> None:
        super().__init__(path)
        self._activity = activity

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; returns when they are on the disk.

        Raises:
            OSError: they cannot be written, such as to a full disk.
        """
        try:
            with self._activity:
                return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's writer of tensors raises an error about its own positions behind that of the file.
            cause = error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise cause from None

    def storage_meta(self) -> StorageMeta | None:
        """Return ``None``, where the base class returns a UUID and the path."""
        return None


class CheckpointReader(FileSystemReader):
    """Reads an untrusted checkpoint. Its metadata is read once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path
        self._metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The checkpoint's tensors, and the files that hold their chunks.

        Raises:
            UserError: the metadata cannot be read, or contains anything else.
        """
        if self._metadata is None:
            self._metadata = _read_metadata(self._folder)
        return self._metadata


class _Unpickler(pickle.Unpickler):
    """Refuses every global that the metadata of a checkpoint does not need."""

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global of the pickle. Names with dots are never on the list."""
        if module == metadata.__name__ and name in _CLASSES:
            return getattr(metadata, name)
        if (module, name) == (filesystem.__name__, "_StorageInfo"):
            return filesystem._StorageInfo  # noqa: SLF001
        # Dtypes are pickled by name. Everything else in torch, above all functions, is refused.
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as getattr(class, name).
        if (module, name) == ("builtins", "getattr"):
            return _member
        # Python 3.13 moved the classes to pathlib._local, and a pickle has the module's name.
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _PATHS[name]
        raise UserError(
            f"{METADATA} refers to {module}.{name}, which no checkpoint needs; "
            "it may have been changed to run code on this machine"
        )


def _layout(name: str) -> torch.layout:
    """``torch.strided``, the only layout of a checkpoint's tensors.

    In place of torch's function of that purpose, whose attributes a pickle could change.
    """
    if name != "torch.strided":
        raise UserError(f"expected tensors of layout torch.strided, found {name!r}")
    return torch.strided


def _member(of: Any, name: str) -> Any:
    """A member of the only enumeration of a checkpoint, in place of ``getattr``, which would give access to all."""
    formats = metadata._MEM_FORMAT_ENCODING  # noqa: SLF001
    if of is not formats or name not in formats.__members__:
        raise UserError(f"expected a memory format in {METADATA}, found the attribute {name!r} of {of!r}")
    return formats[name]


def _read_metadata(folder: Path) -> Metadata:
    try:
        with (folder / METADATA).open("rb") as file:
            found = _Unpickler(file).load()
        _check(found, folder)
    except UserError as error:
        raise UserError(f"cannot read the checkpoint {folder}: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {folder}: {METADATA}: {error.strerror or error}") from None
    except Exception as error:  # bytes that are no pickle raise anything
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"cannot read the checkpoint {folder}: {METADATA} describes none ({what})") from None
    # DCP sets `load_id` on it and fails on None.
    found.storage_meta = StorageMeta()
    return found


def _check(found: Any, folder: Path) -> None:
    """Refuse metadata with wrong types, or whose files are missing, in another folder, or too small for its tensors."""
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise UserError(f"{METADATA} describes none")
    names: set[str] = set()
    for place in found.storage_data.values():
        if not isinstance(place, filesystem._StorageInfo) or not _is_plain(place.relative_path):  # noqa: SLF001
            raise UserError(f"expected names of files of its own folder in {METADATA}, found {place!r}")
        names.add(place.relative_path)
    # Here one message names all of them; DCP would fail in the middle of reading, on some ranks only.
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise UserError(f"it lacks {', '.join(missing)}; use another one")
    num_bytes = 0
    for key, one in found.state_dict_metadata.items():
        if not isinstance(one, TensorStorageMetadata | BytesStorageMetadata):
            raise UserError(f"{METADATA} describes no tensor {key}")
        if isinstance(one, TensorStorageMetadata):
            num_bytes += prod(max(length, 0) for length in one.size) * one.properties.dtype.itemsize
    room = sum((folder / name).stat().st_size for name in names)
    # Before anything is allocated: changed metadata could declare a tensor of terabytes.
    if num_bytes > room:
        raise UserError(f"its tensors have {num_bytes:,} bytes, its files only {room:,}; use another one")


def _is_plain(name: str) -> bool:
    """Whether a name is a file name without any folder."""
    return name not in ("", "..") and Path(name).name == name
