"""Threads begin on the GPU of who starts them: on GPU 0 each rank of a host would make a context of its own."""

import ast
import threading

import pytest
import torch

from shardwright.checkpoint.saving.asynchronous import AsyncSaver
from shardwright.checkpoint.saving.image import _streams_beside
from shardwright.checkpoint.storage.store import Store
from shardwright.common import package
from shardwright.common.threads import Thread, thread_pool
from shardwright.distributed.device_reports import Follower
from shardwright.distributed.ranks import OneRank, Purpose

# Wings whose threads start and reach hosts; none of them brings tensors to a GPU, and the first imports no torch.
WITHOUT_TENSORS = ("launch/", "cluster/programs/", "cluster/doctor/", "cluster/jobs/", "cluster/trust/")


def started(source: str) -> list[str]:
    """The threads that a file starts by the standard library's own names."""
    nodes = [*ast.walk(ast.parse(source))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    names = {"threading.Thread", "ThreadPoolExecutor", "futures.ThreadPoolExecutor", "_thread.start_new_thread"}
    bases = [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    return [ast.unparse(node) for node in calls if ast.unparse(node.func) in names] + [
        f"class of {ast.unparse(base)}" for base in bases if ast.unparse(base) == "threading.Thread"
    ]


def test_all_threads_beside_tensors_are_ours():
    text = "threading.Thread(target=f); ThreadPoolExecutor(3)\nclass A(threading.Thread): ..."
    assert len(started(text)) == 3
    texts = {str(path.relative_to(package.FOLDER)): path.read_text() for path in package.FOLDER.rglob("*.py")}
    words = ("threading.Thread", "ThreadPoolExecutor", "start_new_thread")  # parsing takes long
    found = {name: started(text) for name, text in texts.items() if any(word in text for word in words)}
    found = {name: calls for name, calls in found.items() if calls and not name.startswith(WITHOUT_TENSORS)}
    assert list(found) == ["common/threads.py"], found


@pytest.fixture
def on_gpu_3(monkeypatch):
    """This thread works on GPU 3; the GPUs to which others have gone, by their names."""
    went: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: went.get(threading.current_thread().name, 3))
    monkeypatch.setattr(torch.cuda, "set_device", lambda at: went.setdefault(threading.current_thread().name, at))
    return went


def test_a_thread_begins_on_the_gpu_of_who_starts_it(on_gpu_3):
    seen = []
    thread = Thread(lambda: seen.append(dict(on_gpu_3)), "one", daemon=True)
    assert on_gpu_3 == {}
    thread.start()
    thread.join()
    with thread_pool(1, "of a pool") as pool:
        pool.submit(lambda: seen.append(dict(on_gpu_3))).result()
    assert seen == [{"one": 3}, {"one": 3, "of a pool_0": 3}]


def test_saves_and_the_follower_of_the_pulse_do(on_gpu_3, tmp_path):
    looked = threading.Event()

    class Pulse:
        def look(self):
            looked.set()

        def is_asked(self):
            return False

    follower = Follower(Pulse(), str)
    assert looked.wait(60)
    follower.end()
    assert list(on_gpu_3.values()) == [3]
    saver = AsyncSaver(Store(str(tmp_path)), OneRank(Purpose("saving")))
    saver.save("step-00000001", {("a",): torch.ones(3)}, {}, {}, steady=[("a",)])
    saver.close()
    assert on_gpu_3["saving step-00000001"] == 3


def test_what_is_saved_is_copied_by_a_stream_of_its_own_gpu(monkeypatch):
    """A stream of the current GPU, which need not be the model's, would not wait for the copies of another."""
    made = []

    class Stream:
        def __init__(self, device=None):
            self.device, self.after = device, None
            made.append(self)

        def wait_stream(self, other):
            self.after = other

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    one, two = torch.device("cuda", 1), torch.device("cuda", 2)
    streams = _streams_beside([one, two, one])
    assert {device: (stream.device, stream.after) for device, stream in streams.items()} == {
        one: (one, "stream of cuda:1"), two: (two, "stream of cuda:2"),
    }  # fmt: skip
    assert len(made) == 2
    assert _streams_beside([]) == {}
