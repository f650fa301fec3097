"""Descriptions of checkpoints: a stranger's runs no code, and what torch writes is read."""

import copyreg
import errno
import functools
import importlib
import io
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from pipeloom.errors import UserError
from pipeloom.training.checkpoints import storage
from pipeloom.training.checkpoints.storage import CheckpointReader, CheckpointWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DTYPES = sorted({name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)})


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def write(folder, found):
    (folder / ".metadata").write_bytes(found if isinstance(found, bytes) else pickle.dumps(found))


def hostile(mark: Path):
    """Pickles that would make a file, each with the name that must stop it."""
    command = f"touch {mark}"
    first = pickle.dumps(Calls(copyreg._reconstructor, object, object, None))
    yield Calls(os.system, command), r"(posix|nt)\.system"
    yield Calls(eval, f"open({str(mark)!r}, 'w')"), r"builtins\.eval"
    yield Calls(exec, f"open({str(mark)!r}, 'w')"), r"builtins\.exec"
    yield Metadata({}, storage_data={}, planner_data=[Calls(os.system, command)]), r"posix\.system"
    reach = b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR(V" + command.encode() + b"\ntR."
    yield reach, r"builtins\.__import__"
    yield first, r"copyreg\._reconstructor"
    yield Calls(torch.load, str(mark)), r"torch\.serialization\.load"
    # a name with a dot would reach any attribute of a module on the list: filesystem imports os
    names = ("torch.distributed.checkpoint.filesystem", "os.system")
    dotted = b"".join(b"\x8c" + bytes([len(name)]) + name.encode() for name in names)
    yield b"\x80\x04" + dotted + b"\x93V" + command.encode() + b"\n\x85R.", r"filesystem\.os\.system"
    yield b"ctorch.distributed.checkpoint.metadata\nos\n.", r"metadata\.os"
    yield b"ctorch\nhub\n.", r"torch\.hub"
    yield Calls(subprocess.Popen, ["touch", str(mark)]), r"subprocess\.Popen"
    yield Calls(importlib.import_module, "os"), r"importlib\.import_module"
    yield Calls(pickle.loads, pickle.dumps(Calls(os.system, command))), r"_pickle\.loads"
    yield Calls(functools.partial, os.system, command), r"functools\.partial"
    yield Calls(compile, f"open({str(mark)!r}, 'w')", "x", "exec"), r"builtins\.compile"
    yield Calls(shutil.copyfile, "/proc/self/status", str(mark)), r"shutil\.copyfile"
    yield Calls(Path.touch, mark), r"pathlib.*Path\.touch"
    # protocol 0 makes instances of old classes by name
    yield b"(Vtouch " + str(mark).encode() + b"\nios\nsystem\n.", r"os\.system"
    # a key of the metadata that is an object
    yield Metadata({Calls(os.system, command): None}, storage_data={}), r"posix\.system"
    # a class of the list whose state is set to a function
    yield Metadata({}, storage_data={}, storage_meta=Calls(os.system, command)), r"posix\.system"


def test_no_pickle_runs_code_and_each_is_refused_by_name(tmp_path):
    mark = tmp_path / "made"
    num_tried = 0
    for pickled, name in hostile(mark):
        write(tmp_path, pickled)
        with pytest.raises(UserError, match=rf"cannot read the checkpoint .*: \.metadata refers to .*{name}, which no"):
            CheckpointReader(tmp_path).read_metadata()
        num_tried += 1
        assert not mark.exists()
    assert num_tried == 20
    write(tmp_path, Calls(os.system, f"touch {mark}"))
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()
    assert mark.exists()  # the pickle does run where nothing stops it


def test_a_member_of_an_enumeration_is_read_in_the_form_of_python_3_11_0(tmp_path):
    kinds = metadata._MEM_FORMAT_ENCODING
    # getattr(class, name), as Python 3.11.0 to 3.11.3 pickle it.
    written = pickle.dumps(Calls(getattr, kinds, "TORCH_CONTIGUOUS_FORMAT"))
    assert storage._Unpickler(io.BytesIO(written)).load() is kinds.TORCH_CONTIGUOUS_FORMAT
    for of, name in ((kinds, "__class__"), (kinds, "mro"), (Metadata, "__init__"), (torch.Size, "numel")):
        write(tmp_path, Calls(getattr, of, name))
        with pytest.raises(UserError, match="expected a memory format in .metadata, found the attribute"):
            CheckpointReader(tmp_path).read_metadata()


def test_an_extension_code_is_a_name_like_any_other(tmp_path):
    copyreg.add_extension("os", "system", 77)
    try:
        write(tmp_path, b"\x80\x02\x82\x4d.")
        with pytest.raises(UserError, match=r"refers to os\.system"):
            CheckpointReader(tmp_path).read_metadata()
    finally:
        copyreg.remove_extension("os", "system", 77)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({}), pickle.dumps(Metadata({})), b"\x80\x04N."])
def test_what_describes_no_checkpoint_is_refused(tmp_path, content):
    write(tmp_path, content)
    with pytest.raises(UserError, match=r"cannot read the checkpoint .*: \.metadata describes none"):
        CheckpointReader(tmp_path).read_metadata()


def test_a_tensor_of_every_type_is_written_and_read(tmp_path):
    properties = {name: TensorProperties(getattr(torch, name)) for name in DTYPES}
    described = {name: TensorStorageMetadata(one, torch.Size([0]), []) for name, one in properties.items()}
    write(tmp_path, Metadata(described, storage_data={}))
    assert CheckpointReader(tmp_path).read_metadata().state_dict_metadata == described


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, CheckpointWriter])
def test_what_torch_writes_is_read_back(tmp_path, writer):
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    dcp.save(dict(state), storage_writer=writer(tmp_path), no_dist=True)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=CheckpointReader(tmp_path), no_dist=True)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert FileSystemReader(tmp_path).read_metadata().state_dict_metadata.keys() == state.keys()


class Full(io.FileIO):
    """A file on a disk with room for what is short alone."""

    def write(self, content):
        if len(content) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def test_a_full_disk_is_named_where_torch_names_a_position(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem.FileSystem, "create_stream", lambda _self, path, _mode: Full(path, "w"))
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": torch.zeros(5000)}, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, OSError)
    assert str(error) == "[Errno 28] No space left on device"


def test_equal_tensors_are_equal_files_wherever_they_are_written(tmp_path):
    contents = []
    for name in ("one", "other"):
        state = {"a": torch.arange(6.0), "b": torch.ones(4)}
        dcp.save(state, storage_writer=CheckpointWriter(tmp_path / name), no_dist=True)
        contents.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]


def saved(folder):
    dcp.save({"a": torch.ones(4)}, storage_writer=CheckpointWriter(folder), no_dist=True)
    return FileSystemReader(folder).read_metadata()


def test_files_outside_of_the_checkpoint_are_not_read(tmp_path):
    found = saved(tmp_path)
    for path in ("../secret", "/etc/passwd", ""):
        next(iter(found.storage_data.values())).relative_path = path
        write(tmp_path, found)
        with pytest.raises(UserError, match="expected names of files of its own folder"):
            CheckpointReader(tmp_path).read_metadata()


def test_tensors_that_cannot_be_in_the_files_take_no_memory(tmp_path):
    found = saved(tmp_path)
    found.state_dict_metadata["a"].size = torch.Size([1 << 50])
    write(tmp_path, found)
    with pytest.raises(UserError, match=r"its tensors have 4,503,599,627,370,496 bytes, its files only"):
        CheckpointReader(tmp_path).read_metadata()


def test_a_missing_file_is_named(tmp_path):
    saved(tmp_path)
    next(tmp_path.glob("*.distcp")).unlink()
    with pytest.raises(UserError, match=r"cannot read the checkpoint .*: it lacks __0_0\.distcp; use another one"):
        CheckpointReader(tmp_path).read_metadata()


def test_a_file_of_tensors_runs_no_code_either(tmp_path):
    mark, state = tmp_path / "made", {"a": torch.ones(4)}
    found = saved(tmp_path)
    (place,) = found.storage_data.values()
    torch.save(Calls(os.system, f"touch {mark}"), tmp_path / place.relative_path)
    place.offset, place.length = 0, (tmp_path / place.relative_path).stat().st_size
    write(tmp_path, found)
    with pytest.raises(CheckpointException, match="weights_only|Weights only"):
        dcp.load(dict(state), storage_reader=CheckpointReader(tmp_path), no_dist=True)
    assert not mark.exists()
    torch.load(tmp_path / place.relative_path, weights_only=False)
    assert mark.exists()  # it does run where nothing stops it
