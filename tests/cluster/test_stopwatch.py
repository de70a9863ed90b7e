"""What a GPU takes is measured by its own events, and memory by buffers that no cache holds."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.cluster.bench import roofline, stopwatch
from shardwright.cluster.bench.stopwatch import took_s

GPU = torch.device("cuda", 0)


class Gpu:
    """A GPU with a queue, whose work takes 5 ms each and begins when it is waited for."""

    def __init__(self):
        self.queue, self.clock_ms = [], 0.0

    def event(self):
        event = SimpleNamespace(at_ms=None)

        def record():
            self.queue.append(event)

        def wait():
            for task in self.queue:
                if isinstance(task, float):
                    self.clock_ms += task
                else:
                    task.at_ms = self.clock_ms
            self.queue.clear()

        event.record, event.synchronize = record, wait
        event.elapsed_time = lambda end: end.at_ms - event.at_ms
        return event


def test_what_a_gpu_was_asked_for_is_timed_by_the_gpu():
    gpu = Gpu()
    gpu.queue.append(100.0)  # what it still has to do is no part of it
    assert took_s(lambda: gpu.queue.extend([5.0, 5.0]), GPU, gpu.event) == pytest.approx(0.010)
    assert gpu.queue == []


def test_memory_is_copied_by_buffers_beyond_the_cache(monkeypatch):
    copied = []
    monkeypatch.setattr(roofline, "cache_bytes", lambda device: 10 * 2**20)
    monkeypatch.setattr(roofline, "refill", lambda tensor: copied.append(tensor.nbytes))
    monkeypatch.setattr(roofline, "took_s", lambda run, device: 0.5)
    rate = roofline.copy_rate(torch.device("cpu"), lambda: None)
    assert copied == [80 * 2**20]
    assert rate == 80 * 2**20 / 0.5
    assert stopwatch.cache_bytes(torch.device("cpu")) == 0
