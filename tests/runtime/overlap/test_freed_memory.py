"""A step on a CPU takes the memory that the last one has freed."""

import resource
import subprocess
import sys
from types import SimpleNamespace

import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.runtime import captured, freed_memory

PAGES = 3 * 2**24 // resource.getpagesize()

# In an interpreter of its own: the heap of a process that has done other things may have room to give without a page.
TAKEN = """
import ctypes, resource, runpy
keep_freed_memory = runpy.run_path({file!r})["keep_freed_memory"]
libc = ctypes.CDLL(None)
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page is one fault
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def pages_taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(2**24) for _ in range(3)]
    for block in blocks:
        ctypes.memset(block, 1, 2**24)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min([pages_taken() for _ in range(4)][1:]))
keep_freed_memory()
print(min([pages_taken() for _ in range(4)][1:]))
"""


def test_freed_memory_is_taken_again_without_new_pages():
    done = subprocess.run(
        [sys.executable, "-c", TAKEN.format(file=freed_memory.__file__)], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert before > PAGES / 5  # the allocator learns a little by itself
    assert after < PAGES / 10


def with_a_model():
    calls = []
    captured.keep_freed_memory = lambda: calls.append("by a model")
    sw.init()
    sw.parallelize(nn.Linear(3, 2), lambda model, x: model(x).sum(), torch.ones(2, 3), batch="global")
    return calls


def test_freed_memory_is_kept_where_a_model_runs():
    assert run_ranks(1, with_a_model) == [["by a model"]]


def test_what_the_user_has_told_the_allocator_stays(monkeypatch):
    told = []
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *what: told.append(what)))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    freed_memory.keep_freed_memory()
    assert told == []
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    freed_memory.keep_freed_memory()
    assert len(told) == 2
