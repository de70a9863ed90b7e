"""Checkpoints behind URLs: nothing is renamed there, and locks are leases."""

import itertools
import time
import uuid
from importlib.util import find_spec
from types import SimpleNamespace

import fsspec
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from faulty_files import Faulty, Killed
from saved import good_step, save_step, state_of
from shardwright.checkpoint.format.manifest import MANIFEST
from shardwright.checkpoint.saving.save import save
from shardwright.checkpoint.storage import objects
from shardwright.checkpoint.storage.folders import open_folder
from shardwright.checkpoint.storage.objects import MARK, ObjectFiles, ObjectStore, open_store
from shardwright.checkpoint.storage.store import Retention, Store
from shardwright.data.remote import local_copy
from shardwright.errors import CheckpointError, UsageError
from simulated_ranks import SimulatedRanks


@pytest.fixture(params=["memory", pytest.param("file", marks=pytest.mark.slow)])
def url(request, tmp_path):
    if request.param == "file":
        yield f"file://{tmp_path}/runs"
        return
    name = f"memory://{uuid.uuid4().hex}/runs"
    yield name
    system, root = fsspec.core.url_to_fs(name)
    system.rm(root.rpartition("/")[0], recursive=True)


def no_marks(store):
    for name in store.files.list(store.directory):
        inside = store.files.list(store.path(name))
        assert MARK not in inside, name
        if inside and store.files.is_directory(store.path(name)):  # an empty directory is nothing to an object store
            assert MANIFEST in inside, name


@pytest.mark.parametrize("protocol", ["obs", "cos", "minio", "r2"])
@pytest.mark.parametrize("open_it", [open_store, open_folder, local_copy])
def test_a_store_that_speaks_s3_is_told_what_to_type(protocol, open_it):
    with pytest.raises(UsageError) as refused:
        open_it(f"{protocol}://bucket/runs/a")
    said = str(refused.value)
    assert f"{protocol.upper()} speaks the protocol of S3: type s3://bucket/runs/a with FSSPEC_S3_ENDPOINT_URL=" in said
    assert "AWS_ACCESS_KEY_ID" in said


@pytest.mark.parametrize("url", ["memory", "file"], indirect=True)
def test_steps_are_saved_found_and_given_up(url):
    store = open_store(url, Retention(latest_k=2, top_k=1, metric="loss"))
    assert isinstance(store, ObjectStore)
    assert store.latest() is None
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, 0.3)):
        save_step(store, step, metrics={"loss": loss})
        assert good_step(store) == step
    assert list(store.complete()) == ["step-2", "step-3", "step-4"]
    assert store.files.list(store.directory) == ["latest", "step-2", "step-3", "step-4"]
    store.files.remove(f"{store.directory}/latest")
    assert store.latest() == "step-4"
    no_marks(store)


def test_a_path_is_no_url(tmp_path):
    assert type(open_store(tmp_path)) is Store
    with pytest.raises(UsageError, match="nosuch://x: expected a path, or a URL such as s3://"):
        open_store("nosuch://x")


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_package_that_is_missing_is_named():
    with pytest.raises(UsageError, match="gs:// needs a package that is not installed; type: pip install gcsfs"):
        open_store("gs://runs/a")


def test_torch_reads_what_was_saved_to_a_url(tmp_path):
    save_step(open_store(f"file://{tmp_path}/runs"), 5)
    dcp_to_torch_save(tmp_path / "runs" / "step-5", tmp_path / "whole.pt")
    assert bool((torch.load(tmp_path / "whole.pt", weights_only=True)["model"]["weight"] == 5).all())


def test_ranks_save_to_a_url_together(url):
    state = {**state_of(1), **{("model", f"w{i}"): torch.full((3,), float(i)) for i in range(5)}}
    SimulatedRanks.run(3, lambda ranks: save(open_store(url), "step-1", state, {"step": 1}, {}, ranks))
    store = open_store(url)
    assert good_step(store) == 1
    assert {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"} < set(store.files.list(store.path("step-1")))


def kill():
    raise Killed


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_dies_at_any_operation_leaves_a_good_checkpoint(url, every):
    keep_one = Retention(latest_k=1)

    def store_at(place, files=None):
        system, root = fsspec.core.url_to_fs(f"{url}/{place}")
        return ObjectStore(root, files or ObjectFiles(system, lease_s=0.05), keep_one)

    save_step(store_at("counted"), 1)
    counted = Faulty(store_at("counted").files)
    save_step(store_at("counted", counted), 2)
    assert {"create", "write", "finish", "remove", "lock", "read"} < set(counted.done)
    for at in range(0, len(counted.done), every):
        save_step(store_at(at), 1)
        dying = Faulty(store_at(at).files, at, kill, stays=True)
        with pytest.raises(Killed):
            save_step(store_at(at, dying), 2)
        for lock in dying.locks:
            lock.stop()
        assert good_step(store_at(at)) in (1, 2)
        save_step(store_at(at), 3)
        assert good_step(store_at(at)) == 3
        no_marks(store_at(at))
        assert list(store_at(at).complete()) == ["step-3"]


def test_what_others_keep_beside_the_checkpoints_stays(url):
    store = open_store(url)
    store.files.make_directory(f"{store.directory}/notes")
    store.files.system.pipe_file(f"{store.directory}/notes/mine.txt", b"mine")
    save_step(store, 1)
    save_step(store, 2)
    assert store.files.read(f"{store.directory}/notes/mine.txt") == b"mine"


def test_the_only_checkpoint_is_not_replaced(url):
    store = open_store(url)
    save_step(store, 1, name="last")
    with pytest.raises(CheckpointError, match="is the only complete checkpoint here: objects cannot be"):
        save_step(store, 2, name="last")
    assert good_step(store) == 1
    save_step(store, 3)
    save_step(store, 4, name="last")
    assert good_step(store) == 4
    no_marks(store)


def _full():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("at", ["create", "write", "finish"])
def test_a_failure_is_an_error_and_leaves_nothing(url, at):
    store = open_store(url)
    save_step(store, 1)
    failing = ObjectStore(store.directory, Faulty(store.files, at, _full))
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_step(failing, 2)
    assert store.files.list(store.directory) == ["latest", "step-1"]
    assert good_step(store) == 1


def test_a_second_job_is_refused_while_the_first_lives_and_waits_for_the_lease_of_a_dead_one(url):
    system, root = fsspec.core.url_to_fs(url)
    store = ObjectStore(root, ObjectFiles(system, lease_s=3))
    save_step(store, 1)
    lock = store.files.lock(f"{root}/.lock", "process 7 on host there, since noon")
    with pytest.raises(CheckpointError, match=r"another save into .*runs is under way, by process 7 on host there"):
        save_step(store, 2)
    lock.stop()
    save_step(store, 3)
    assert good_step(store) == 3


class WritingFiles(ObjectFiles):
    """Objects that are empty every other time that they are read, as a file is that is being written."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._reads = itertools.count()

    def read(self, path):
        found = super().read(path)
        return found if next(self._reads) % 2 else b""


@pytest.mark.parametrize("files", [ObjectFiles, WritingFiles])
def test_the_lock_of_a_live_job_is_found_whatever_the_clock_says_and_while_it_is_written(url, monkeypatch, files):
    """As after the host of both stood still: the holder has not written yet, and the lease is long over."""
    clock = itertools.count(step=100)
    monkeypatch.setattr(objects, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    system, root = fsspec.core.url_to_fs(url)
    holder = ObjectFiles(system, lease_s=3)
    holder.make_directory(root)
    lock = holder.lock(f"{root}/.lock", "process 7 on host there")
    with pytest.raises(objects.Locked, match=r"^process 7 on host there$"):
        files(system, lease_s=3).lock(f"{root}/.lock", "process 8")
    holder.unlock(lock)


class LateFiles(ObjectFiles):
    """Objects of a process that stands still before it writes or removes: others act then."""

    def __init__(self, *arguments, meanwhile, **options):
        super().__init__(*arguments, **options)
        self._meanwhile = meanwhile

    def _left(self, path):
        found = super()._left(path)
        if not path.endswith(".lock"):
            return found
        self._meanwhile()
        return found


@pytest.mark.parametrize("dead", [False, True], ids=["free", "left by a dead job"])
def test_of_two_who_find_a_lock_free_or_dead_one_holds_it(url, dead):
    system, root = fsspec.core.url_to_fs(url)
    files, taken = ObjectFiles(system, lease_s=1), []
    files.make_directory(root)
    path = f"{root}/.lock"
    if dead:
        files.lock(path, "process 6").stop()
    late = LateFiles(system, lease_s=1, meanwhile=lambda: taken.append(files.lock(path, "process 7")))
    with pytest.raises(objects.Locked, match=r"^process 7$"):
        late.lock(path, "process 8")
    assert taken[0].is_held()
    files.unlock(taken[0])
    assert files.list(root) == []


def test_a_save_whose_lock_was_taken_while_it_stood_still_does_not_count(url):
    system, root = fsspec.core.url_to_fs(url)
    store = ObjectStore(root, ObjectFiles(system, lease_s=0.1))
    save_step(store, 1)
    late = store.begin("step-2")
    late.lock.stop()  # as where the whole process stands still
    other = store.begin("step-3")
    with pytest.raises(CheckpointError, match=r"cannot complete .*step-2: this process stood still for so long"):
        store.commit(late, store.manifest("step-1"))
    store.abort(late)
    assert other.lock.is_held()
    store.abort(other)
    assert store.files.list(root) == ["latest", "step-1"]
