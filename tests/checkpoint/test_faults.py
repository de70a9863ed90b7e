"""Whatever happens while a checkpoint is saved, a good one loads, and the next save removes what is left."""

import errno
import os

import pytest

from faulty_files import Disk, Faulty, Killed, crashes
from rows import slow
from saved import good_step, no_leftovers, save_step
from shardwright.checkpoint.storage.files import LocalFiles
from shardwright.checkpoint.storage.store import Retention, Store
from shardwright.errors import CheckpointError

KEEP_ONE = Retention(latest_k=1)


def kill():
    raise Killed


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def points(files, directory, replaced):
    """The operations of the second save into ``directory``, in which an old checkpoint goes: at each it is to fail."""
    save_step(Store(directory, files), 1, name="same" if replaced else None)
    counted = Faulty(files)
    save_step(Store(directory, counted, KEEP_ONE), 2, name="same" if replaced else None)
    assert {"create", "write", "finish", "sync_directory", "rename", "remove", "lock"} < set(counted.done)
    assert ("exchange" in counted.done) == replaced
    return range(len(counted.done))


@pytest.mark.parametrize(
    ("first", "replaced", "seeds"),
    [
        (False, True, 1),
        (True, False, 1),
        *slow((False, False, 1), (False, True, 6)),
    ],
    ids=["the same name", "the first save", "another name", "many crashes"],
)
def test_a_machine_that_fails_at_any_operation_leaves_a_good_checkpoint(first, replaced, seeds):
    name = "same" if replaced else None
    for at in [*points(Disk(), "/runs/mine", replaced), 10**6]:
        for keeps in crashes(seeds):
            disk = Disk()
            if not first:
                save_step(Store("/runs/mine", disk), 1, name=name)
            returned = False
            try:
                save_step(Store("/runs/mine", Faulty(disk, at, kill, stays=True), KEEP_ONE), 2, name=name)
                returned = True
            except Killed:
                pass
            left = disk.after_crash(keeps)
            store = Store("/runs/mine", left, KEEP_ONE)
            if returned or not first or store.latest() is not None:
                step = good_step(store)
                assert step == 2 if returned else step in (1, 2)
            save_step(store, 3, name=name)
            assert good_step(store) == 3
            no_leftovers(store)
            assert list(store.complete()) == [name or "step-3"]


@pytest.mark.slow
def test_a_process_that_dies_at_any_file_operation_leaves_a_good_checkpoint(tmp_path):
    for at in points(LocalFiles(), str(tmp_path / "counted"), True):
        directory = tmp_path / str(at)
        save_step(Store(directory), 1, name="same")
        dying = Faulty(LocalFiles(), at, kill, stays=True)
        with pytest.raises(Killed):
            save_step(Store(directory, dying, KEEP_ONE), 2, name="same")
        dying.release()
        assert good_step(Store(directory)) in (1, 2)
        save_step(Store(directory, retention=KEEP_ONE), 3, name="same")
        assert good_step(Store(directory)) == 3
        no_leftovers(Store(directory))


@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "from then on"])
@pytest.mark.filterwarnings("ignore:.*is saved, but an older checkpoint could not be removed")
def test_an_operation_that_fails_is_an_error_and_the_last_good_one_stays(tmp_path, stays):
    failures = points(LocalFiles(), str(tmp_path / "counted"), False)
    told = []
    for at in failures:
        directory = tmp_path / str(at)
        save_step(Store(directory), 1)
        failing = Faulty(LocalFiles(), at, full, stays=stays)
        try:
            save_step(Store(directory, failing, KEEP_ONE), 2)
        except CheckpointError as error:
            told.append(str(error))
        assert good_step(Store(directory)) in (1, 2)
        failing.release()
        save_step(Store(directory, retention=KEEP_ONE), 3)
        assert good_step(Store(directory)) == 3
        no_leftovers(Store(directory))
    assert len(told) > len(failures) / 2
    assert all("No space left on device" in message for message in told), told
