"""Which checkpoints there are, which is the latest, which stay; real disks that are full or read-only."""

import subprocess

import pytest

from saved import good_step, no_leftovers, save_step, state_of
from shardwright.checkpoint.format.manifest import MANIFEST
from shardwright.checkpoint.saving.save import save
from shardwright.checkpoint.storage.files import LocalFiles
from shardwright.checkpoint.storage.store import Retention, Store
from shardwright.errors import CheckpointError
from simulated_ranks import SimulatedRanks
from small_disk import mounted


@pytest.mark.parametrize("text", [None, b"", b"step-9\n", b"../x\n", b"\xff\xfe\n", b"step-2\nstep-1\n", b".lock\n"])
def test_without_a_good_pointer_the_newest_complete_one_is_found_by_reading(tmp_path, text):
    store = Store(tmp_path)
    for step in (10, 9, 2):  # neither names nor numbers tell which came last
        save_step(store, step)
    (tmp_path / "step-9").rename(tmp_path / "step-09")
    (tmp_path / "latest").unlink()
    if text is not None:
        (tmp_path / "latest").write_bytes(text)
    assert store.latest() == "step-2"
    assert list(store.complete()) == ["step-10", "step-09", "step-2"]


def test_the_pointer_counts_where_it_is_good(tmp_path):
    store = Store(tmp_path)
    save_step(store, 1)
    save_step(store, 2)
    (tmp_path / "latest").write_text("step-1\n")
    assert store.latest() == "step-1"


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "altered"])
def test_a_directory_without_a_valid_manifest_is_no_checkpoint(tmp_path, damage):
    store = Store(tmp_path)
    save_step(store, 1)
    save_step(store, 2)
    manifest = tmp_path / "step-2" / MANIFEST
    text = manifest.read_text()
    manifest.unlink()
    if damage != "missing":
        manifest.write_text(
            {"empty": "", "short": text[:-3], "altered": text.replace('"step": 2', '"step": 7')}[damage]
        )
    assert store.latest() == "step-1"
    assert list(store.complete()) == ["step-1"]
    with pytest.raises(CheckpointError, match="step-2"):
        store.manifest("step-2")
    save_step(store, 2)  # the same name again: the broken one goes
    assert good_step(store) == 2
    no_leftovers(store)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "latest", "two\nlines"])
def test_a_name_that_cannot_be_one_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be the name of a checkpoint"):
        save(Store(tmp_path), name, state_of(1), {}, {}, SimulatedRanks(0, [None], [None]))
    assert list(tmp_path.iterdir()) == []


LOSSES = {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.3, 5: 0.8, 6: float("nan"), 7: None, 8: 0.7}


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (Retention(latest_k=3), [6, 7, 8]),
        (Retention(top_k=1, metric="loss"), [4, 8]),  # of equals the newer; the newest always
        (Retention(top_k=2, metric="loss", mode="max"), [1, 5, 8]),
        (Retention(latest_k=2, top_k=1, metric="another"), [7, 8]),
    ],
    ids=str,
)
def test_retention(tmp_path, retention, left):
    store = Store(tmp_path, retention=retention)
    for step, loss in LOSSES.items():
        save_step(store, step, metrics={} if loss is None else {"loss": loss})
        assert store.latest() == f"step-{step}"
    assert list(store.complete()) == [f"step-{step}" for step in left]
    assert [good_step(store, name) for name in store.complete()] == left
    no_leftovers(store)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"latest_k": 0}, "latest_k=0: keep at least 1"),
        ({"top_k": 2}, "a metric tells the best"),
        ({"metric": "loss"}, "a metric tells the best"),
        ({"top_k": 2, "metric": "loss", "mode": "best"}, "say whether 'min' or 'max' is best"),
    ],
)
def test_a_retention_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(CheckpointError, match=message):
        Retention(**arguments)


class Sticky(LocalFiles):
    """Files of which some cannot be removed."""

    def remove(self, path):
        if "step-1" in path:
            raise PermissionError(13, "Permission denied", path)
        super().remove(path)


def test_an_old_one_that_cannot_be_removed_is_a_warning_and_goes_with_the_next_save(tmp_path):
    save_step(Store(tmp_path), 1)
    with pytest.warns(UserWarning, match="an older checkpoint could not be removed: .*: Permission"):
        save_step(Store(tmp_path, Sticky(), Retention(latest_k=1)), 2)
    assert list(Store(tmp_path).complete()) == ["step-2"]
    save_step(Store(tmp_path), 3)
    no_leftovers(Store(tmp_path))


class FullOn(LocalFiles):
    def create(self, path):
        if "__1_0" in path:
            raise OSError(28, "No space left on device", path)
        return super().create(path)


def test_a_rank_that_cannot_write_is_named_by_all_and_nothing_is_saved(tmp_path):
    def both(ranks, step, files):
        state = {("model", f"w{i}"): state_of(step)["model", "weight"] for i in range(6)}
        return save(Store(tmp_path, files), f"step-{step}", {**state, **state_of(step)}, {"step": step}, {}, ranks)

    SimulatedRanks.run(3, lambda ranks: both(ranks, 1, LocalFiles()))
    errors = SimulatedRanks.run(3, lambda ranks: both(ranks, 2, FullOn()))
    assert len({str(error) for error in errors}) == 1
    assert "nothing was saved: rank 1: /" in str(errors[0])
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert Store(tmp_path).latest() == "step-1"
    no_leftovers(Store(tmp_path))
    SimulatedRanks.run(3, lambda ranks: both(ranks, 3, LocalFiles()))
    assert Store(tmp_path).latest() == "step-3"


def test_a_full_disk_is_an_error_and_the_last_good_one_stays(tmp_path):
    with mounted(tmp_path / "small", 1 << 20) as disk:
        store = Store(disk, retention=Retention(latest_k=1))
        save_step(store, 1, numel=100_000)
        for numel in (200_000, 170_000, 10_000_000):  # 1 MiB holds 262 144 numbers, of which 100 000 are taken
            with pytest.raises(
                CheckpointError, match=r"step-2.*: No space left on device \(.* [kM]B were to be written, "
            ):
                save_step(store, 2, numel=numel)
            assert good_step(store) == 1
            no_leftovers(store)
        save_step(store, 3, numel=50_000)
        assert good_step(store) == 3


def test_a_first_save_that_fails_leaves_no_directory(tmp_path):
    with mounted(tmp_path / "small", 1 << 20) as disk:
        store = Store(disk / "above" / "checkpoints")
        for _ in range(2):
            with pytest.raises(CheckpointError, match="No space left on device"):
                save_step(store, 1, numel=10_000_000)
            assert list(disk.iterdir()) == []
        (disk / "above").mkdir()
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_step(store, 1, numel=10_000_000)
        assert list(disk.rglob("*")) == [disk / "above"]
        save_step(store, 1)
        assert good_step(store) == 1


def test_a_read_only_directory_is_an_error_and_the_last_good_one_loads(tmp_path):
    with mounted(tmp_path / "fixed", 1 << 20) as disk:
        store = Store(disk)
        save_step(store, 1)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(CheckpointError, match=r"cannot begin to save .*step-2: .*: Read-only file system"):
            save_step(store, 2)
        assert good_step(store) == 1


def test_a_file_in_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot begin to save .*: Not a directory"):
        save_step(Store(tmp_path / "file"), 1)
    with pytest.raises(CheckpointError, match="Not a directory"):
        save_step(Store(tmp_path / "file" / "inner"), 1)
