"""Saving and loading a checkpoint, beside the plain writes and reads of the same bytes and beside DCP alone.

    python benchmarks/checkpoint.py [save] [async] [load] [--gb 1.2] [--rounds 7] [--dir DIR] [--cpu]

Two ranks hold a state that is split between them: parameters and two moments of an optimizer. All ways take turns
(A B C A B C ...), so that all see the same disk; rows give medians, and the median of the ratios within a round.
A time is from one barrier to the next, so it is the slowest rank's. Files are removed after every round, unmeasured.

save    the bytes written and fsynced by each rank to one file; our save; torch.distributed.checkpoint.save
async   beside a training loop on both ranks (matrix products, an all-reduce, and after each 20 of them a step of an
        optimizer): how long the call takes, how long the optimizer waited for the copy, and how much longer all steps
        until the save is complete take, with the call, than as many steps without one; dcp.async_save likewise
load    onto 1 and onto 4 ranks, beside reading as many bytes into memory that is there: cold, as a job meets the files
        that goes on (before each of both every rank has the kernel forget them), and warm, from the page cache

With ``--cpu`` the seconds of save and load are those of the processor, of all ranks together: what the disk takes is
not in them, and other programs disturb them little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from shardwright.checkpoint.loading.load import load
from shardwright.checkpoint.saving.asynchronous import AsyncSaver, own_ranks
from shardwright.checkpoint.saving.save import TO_SAVE, save
from shardwright.checkpoint.storage.store import Store
from shardwright.distributed.ranks import ProcessRanks

WIDTH = 1024
OPTIMIZER_EVERY = 20
"""Steps of the small training between those of its optimizer, together about a second: the forward and backward of a
model of 100 million parameters, as large as what is saved, over about a hundred tokens."""


def flat_state(gigabytes: float) -> dict[tuple[str, ...], DTensor]:
    """Layers of four matrices of 4 to 16 MiB and two vectors, each with two moments, all split over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    shapes = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH),
              "norm1": (WIDTH,), "norm2": (WIDTH,)}  # fmt: skip
    layer_bytes = 3 * 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    state = {}
    for layer in range(max(1, round(gigabytes * 1e9 / layer_bytes))):
        for name, shape in shapes.items():
            for kind in (("model",), ("optimizer", "exp_avg"), ("optimizer", "exp_avg_sq")):
                rows = shape[0] // dist.get_world_size()
                local = torch.full((rows, *shape[1:]), float(layer + 1))
                state[(*kind, f"layer{layer}.{name}")] = DTensor.from_local(local, mesh, [Shard(0)])
    return state


def nested(state: dict[tuple[str, ...], DTensor]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (*above, name), tensor in state.items():
        at = found
        for part in above:
            at = at.setdefault(part, {})
        at[name] = tensor
    return found


def local_bytes(state: dict[tuple[str, ...], DTensor]) -> int:
    return sum(t.to_local().numel() * t.to_local().element_size() for t in state.values())


def timed_s(do: Callable[[], Any], cpu: bool = False) -> float:
    """Seconds until all ranks have done it, or the processor's of all ranks."""
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    do()
    took = torch.tensor(time.process_time() - start_cpu, dtype=torch.float64)
    dist.all_reduce(took)
    return took.item() if cpu else time.perf_counter() - start


def extra_memory_mib(do: Callable[[], Any]) -> float:
    """By how much the memory of this process rose at most."""
    Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    do()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return (int(peak.split()[1]) * 1024 - before) / (1 << 20)


def plain_write(state: dict[tuple[str, ...], DTensor], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / f"plain{dist.get_rank()}", "wb", buffering=0) as file:
        for tensor in state.values():
            view = memoryview(tensor.to_local().contiguous().view(-1).view(torch.uint8).numpy())
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def dcp_save(state: dict[str, Any], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory)


def our_save(state: Any, directory: Path, ranks: ProcessRanks) -> None:
    save(Store(directory), "step-00000001", state, {"step": 1}, {}, ranks)


def clean(directory: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        os.sync()
        time.sleep(0.5)  # the disk is told of the blocks that are free again only after that
    dist.barrier()


def measure_save(directory: Path, gigabytes: float, rounds: int, cpu: bool) -> dict[str, Any]:
    state, ranks = flat_state(gigabytes), ProcessRanks(TO_SAVE)
    whole = nested(state)
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: plain_write(state, directory / "plain"),
        "ours": lambda: our_save(state, directory / "ours", ranks),
        "dcp": lambda: dcp_save(whole, directory / "dcp"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    memory = {}
    for number in range(rounds + 1):
        for name in list(ways)[number % 3 :] + list(ways)[: number % 3]:  # each is first as often as the others
            if number:
                times[name].append(timed_s(ways[name], cpu))
            else:
                memory[name] = extra_memory_mib(ways[name])
            clean(directory)
    return {"times": times, "memory_mib": memory, "local_bytes": local_bytes(state)}


class Training:
    """Steps that compute and reduce; ``run`` ends when every rank is content, or after ``count`` steps.

    Every `OPTIMIZER_EVERY` of them an optimizer steps, which has no gradients and so does nothing but wait for a copy
    that is under way. ``waited_s`` is how long it did.
    """

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=0.0)
        self.count = 0
        self.waited_s = 0.0
        self.a, self.b = torch.randn(512, 512), torch.randn(512, 512)
        self.gradient = torch.ones(1 << 18)

    def step(self, content: bool = False) -> bool:
        for _ in range(6):
            self.a = torch.tanh(self.a @ self.b)
        self.gradient.fill_(1)
        self.gradient[0] = float(content)
        dist.all_reduce(self.gradient)
        self.count += 1
        if self.count % OPTIMIZER_EVERY == 0:
            start = time.perf_counter()
            self.optimizer.step()
            self.waited_s += time.perf_counter() - start
        return float(self.gradient[0]) == dist.get_world_size()

    def until(self, content: Callable[[], bool]) -> tuple[int, float]:
        """How many steps, and how many seconds."""
        start, count = time.perf_counter(), 1
        while not self.step(content()):
            count += 1
        return count, time.perf_counter() - start

    def steps_s(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        return time.perf_counter() - start


def measure_async(directory: Path, gigabytes: float, rounds: int, with_dcp: bool) -> dict[str, Any]:
    state, ranks = flat_state(gigabytes), ProcessRanks(TO_SAVE)
    training = Training([tensor for (kind, *_), tensor in state.items() if kind == "model"])
    whole = nested(state)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    saver = AsyncSaver(Store(directory / "async"), own_ranks())

    def first() -> None:
        saver.save("step-00000000", state, {"step": 0}, {}, state)
        saver.wait()

    rose = extra_memory_mib(first)
    clean(directory)
    training.steps_s(20)

    def ours() -> Callable[[], bool]:
        training.count, training.waited_s = 0, 0.0
        saver.save("step-00000001", state, {"step": 1}, {}, state)
        return lambda: not saver.saving

    def theirs() -> Callable[[], bool]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save(whole, checkpoint_id=directory / "dcp", process_group=group)
        return lambda: bool(future.done())

    found: dict[str, list[float]] = {
        "sync": [],
        "call": [],
        "lost": [],
        "dcp call": [],
        "dcp lost": [],
        "waited": [],
        "steps": [],
    }
    for number in range(rounds + 1):
        results = {"sync": timed_s(lambda: our_save(state, directory / "ours", ranks))}
        clean(directory)
        for prefix, begin in (("", ours), ("dcp ", theirs)) if with_dcp else (("", ours),):
            dist.barrier()
            start = time.perf_counter()
            content = begin()
            call_s = time.perf_counter() - start
            count, with_s = training.until(content)
            waited_s = training.waited_s
            saver.wait()
            without_s = training.steps_s(count)
            results |= {f"{prefix}call": call_s, f"{prefix}lost": call_s + with_s - without_s}
            if not prefix:
                results |= {"steps": count, "waited": waited_s}
            clean(directory)
        if number:
            for name, value in results.items():
                found[name].append(value)
    saver.close()
    return {"times": found, "memory_mib": rose, "local_bytes": local_bytes(state)}


def plain_read(files: list[Path], buffer: torch.Tensor, start: int) -> None:
    """As many bytes as ``buffer`` has, from byte ``start`` of the files one after the other."""
    view = memoryview(buffer.numpy())
    for path in files:
        size = path.stat().st_size
        with open(path, "rb", buffering=0) as file:
            file.seek(min(start, size))
            while view and (count := file.readinto(view)):
                view = view[count:]
        start = max(0, start - size)


def forget(directory: Path) -> None:
    """Have the kernel drop from its page cache what lies in a directory; all ranks call it."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in directory.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    dist.barrier()


def measure_load(directory: Path, gigabytes: float, rounds: int, cpu: bool) -> dict[str, Any]:
    """On any number of ranks, what two have saved."""
    state = flat_state(gigabytes)
    files = sorted((directory / "step-00000001").glob("*.distcp"))
    size = local_bytes(state)
    buffer = torch.zeros(size, dtype=torch.uint8)
    start = dist.get_rank() * size
    ways = {
        "plain": lambda: plain_read(files, buffer, start),
        "ours": lambda: load(directory / "step-00000001", state),
    }
    times: dict[str, list[float]] = {f"{how} {way}": [] for how in ("cold", "warm") for way in ways}
    for number in range(rounds + 1):
        for how in ("cold", "warm"):
            for way in list(ways) if number % 2 else reversed(list(ways)):
                if how == "cold":
                    forget(directory / "step-00000001")
                took_s = timed_s(ways[way], cpu)
                if number:
                    times[f"{how} {way}"].append(took_s)
    for (*_, name), tensor in state.items():
        assert float(tensor.to_local().view(-1)[-1]) == int(name.removeprefix("layer").partition(".")[0]) + 1, name
    return {"times": times, "memory_mib": extra_memory_mib(lambda: load(directory / "step-00000001", state))}


def save_once(directory: Path, gigabytes: float) -> None:
    our_save(flat_state(gigabytes), directory, ProcessRanks(TO_SAVE))


def _rank(rank: int, size: int, port: int, pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    pipe.send(function(*arguments))
    pipe.close()
    dist.barrier()
    os._exit(0)  # what dcp.async_save leaves behind may not end


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns on rank 0 of so many processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    children, pipes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        children.append(context.Process(target=_rank, args=(rank, size, port, theirs, function, arguments)))
        children[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        results = [pipe.recv() for pipe in pipes]
        return results[0]
    finally:
        for child in children:
            child.join(20)
            if child.is_alive():
                child.kill()


def ratios(ours: list[float], theirs: list[float]) -> str:
    found = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(found):.2f} | {found[0]:.2f} to {found[-1]:.2f}"


def verdict(ours: list[float], theirs: list[float], most: float) -> str:
    found = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return f"at most {most:g}: {'holds' if found <= most else 'MISSED'}"


def report_save(result: dict[str, Any]) -> None:
    times = result["times"]
    print("| way | s | ours / it | lowest to highest | extra memory of rank 0, MiB |\n| --- | --- | --- | --- | --- |")
    for name, label in (("plain", "write + fsync"), ("dcp", "dcp.save"), ("ours", "ours")):
        print(
            f"| {label} | {statistics.median(times[name]):.2f} | {ratios(times['ours'], times[name])} "
            f"| {result['memory_mib'][name]:.0f} |"
        )


def report_async(result: dict[str, Any]) -> None:
    times = result["times"]
    print("| | s | of a synchronous save | lowest to highest | verdict |\n| --- | --- | --- | --- | --- |")
    limits = {"call": 0.1, "lost": 1.0}
    for name in ("sync", "call", "waited", "lost", "dcp call", "dcp lost"):
        if times[name]:
            said = verdict(times[name], times["sync"], limits[name]) if name in limits else ""
            print(f"| {name} | {statistics.median(times[name]):.3f} | {ratios(times[name], times['sync'])} | {said} |")
    print(
        f"\nsteps during a save: {statistics.median(times['steps']):.0f}; memory for the copy on rank 0: "
        f"{result['memory_mib']:.0f} MiB, for {result['local_bytes'] / (1 << 20):.0f} MiB of the state"
    )


def report_load(results: dict[int, dict[str, Any]]) -> None:
    print("| onto | files | plain read, s | load, s | load / plain | lowest to highest | extra memory, MiB | verdict |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size, result in results.items():
        for how in ("cold", "warm"):
            plain, ours = result["times"][f"{how} plain"], result["times"][f"{how} ours"]
            print(
                f"| {size} | {how} | {statistics.median(plain):.3f} | {statistics.median(ours):.3f} "
                f"| {ratios(ours, plain)} | {result['memory_mib']:.0f} | {verdict(ours, plain, 1.3)} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["save", "async", "load"], help="save, async, load")
    parser.add_argument("--gb", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=None, help="where to write, for the disk that is meant")
    parser.add_argument("--no-dcp-async", action="store_true", help="leave dcp.async_save out, where it hangs")
    parser.add_argument("--cpu", action="store_true", help="seconds of the processor, of all ranks together")
    given = parser.parse_args()
    if unknown := set(given.what) - {"save", "async", "load"}:
        parser.error(f"unknown: {', '.join(unknown)}; expected save, async or load")
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=given.dir) as folder:
        directory = Path(folder)
        if "save" in given.what:
            report_save(on_ranks(2, measure_save, directory, given.gb, given.rounds, given.cpu))
        if "async" in given.what:
            report_async(on_ranks(2, measure_async, directory, given.gb, given.rounds, not given.no_dcp_async))
        if "load" in given.what:
            on_ranks(2, save_once, directory, given.gb)
            asked = directory, given.gb, given.rounds, given.cpu
            report_load({size: on_ranks(size, measure_load, *asked) for size in (1, 4)})


if __name__ == "__main__":
    sys.exit(main())
