"""Files written past the page cache hold what was written, on file systems that can do it and those that cannot."""

import errno
import fcntl
import itertools
import os
import random
import threading

import pytest
from test_store import mounted

from saved import good_step, no_leftovers, save_step
from shardwright.checkpoint.storage import direct
from shardwright.checkpoint.storage.direct import BUFFER_BYTES, DirectFile
from shardwright.checkpoint.storage.files import LocalFiles
from shardwright.checkpoint.storage.store import Store
from shardwright.errors import CheckpointError


@pytest.mark.parametrize("size", [0, 1, 4096, BUFFER_BYTES - 1, BUFFER_BYTES, 2 * BUFFER_BYTES + 4097])
def test_what_is_written_is_there(tmp_path, size):
    data = random.Random(size).randbytes(size)
    file = DirectFile(str(tmp_path / "f"))
    for start, stop in itertools.pairwise(sorted({0, size // 7, size // 7 + 1, size // 2, size})):
        assert file.write(memoryview(data)[start:stop]) == len(data[start:stop])
    file.finish()
    assert (tmp_path / "f").read_bytes() == data
    file.close()  # a second time is nothing


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        DirectFile(str(tmp_path / "f"))
    assert (tmp_path / "f").read_text() == "mine"


@pytest.mark.parametrize("odd", ["refuses", "stops in the middle of a block"])
def test_a_disk_that_wants_other_alignments_gets_the_bytes_through_the_page_cache(tmp_path, monkeypatch, odd):
    real = os.pwrite

    def pwrite(descriptor, data, start):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            if odd == "refuses":
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(descriptor, data[:4096], start) - 1
        return real(descriptor, data, start)

    monkeypatch.setattr(direct.os, "pwrite", pwrite)
    data = random.Random(1).randbytes(BUFFER_BYTES + 12345)
    file = DirectFile(str(tmp_path / "f"))
    file.write(data)
    file.finish()
    assert (tmp_path / "f").read_bytes() == data


def test_a_failure_of_the_thread_is_raised_and_leaves_no_thread(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = threading.active_count()
    monkeypatch.setattr(direct.os, "pwrite", full)
    files = LocalFiles()
    file = files.create(str(tmp_path / "f"), direct.LEAST_BYTES)
    file.write(bytes(BUFFER_BYTES))
    with pytest.raises(OSError, match="No space left on device"):
        file.write(bytes(BUFFER_BYTES))
    files.discard(file)
    assert threading.active_count() <= before


def test_a_large_state_is_saved_and_a_disk_too_small_for_it_is_an_error(tmp_path):
    numel = 9_000_000  # 36 MB
    save_step(Store(tmp_path / "large"), 1, numel)
    assert good_step(Store(tmp_path / "large")) == 1
    with mounted(tmp_path / "small", 50 << 20) as disk:
        save_step(Store(disk), 1, numel)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_step(Store(disk), 2, numel)
        assert good_step(Store(disk)) == 1
        no_leftovers(Store(disk))
