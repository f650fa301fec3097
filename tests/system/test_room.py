"""Room for files that are written through memory."""

import errno
import os

import pytest

from pipeloom.system.room import take_room


def refusing(code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.fixture
def opened(tmp_path):
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield file
    os.close(file)


@pytest.fixture(params=["fallocate", "unsupported", "missing"])
def system(request, monkeypatch):
    if request.param == "missing":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    elif request.param == "unsupported":
        monkeypatch.setattr(os, "posix_fallocate", refusing(errno.EOPNOTSUPP), raising=False)


@pytest.mark.usefixtures("system")
def test_a_file_is_not_sparse_and_what_it_had_stays(opened):
    take_room(opened, 0)
    assert os.fstat(opened).st_size == 0
    take_room(opened, 10_000)
    os.pwrite(opened, b"x" * 10_000, 0)
    take_room(opened, 3_000_000, 10_000)
    found = os.fstat(opened)
    assert found.st_size == 3_010_000
    assert found.st_blocks * 512 >= found.st_size
    assert os.pread(opened, 20_000, 0) == b"x" * 10_000 + bytes(10_000)


def test_a_full_disk_is_an_error(opened, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC), raising=False)
    with pytest.raises(OSError, match="No space left"):
        take_room(opened, 10)
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(os, "pwrite", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        take_room(opened, 10)
