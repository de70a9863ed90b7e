"""The steps of `gpu_first.py` that one process takes: NAME DEVICE quick|whole ANSWER. Each returns what it found."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.compiler.plan.pricing.hardware import for_device
from shardwright.runtime.compiled.compiler import NotCompiled
from shardwright.training.zoo import GPT, Perceptron, resnet18
from shardwright.training.zoo.models.resnet import resnet50

STEPS: dict[str, Callable[[torch.device, bool], dict[str, Any]]] = {}


def step(name: str) -> Callable[[Any], Any]:
    """Note a function as the step of that name."""
    return lambda function: STEPS.setdefault(name, function)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


@dataclass(frozen=True)
class Network:
    """A model and its batch, made anew with equal numbers at each call."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]

    def made(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
        sw.set_seed(0)
        model, (x, y) = self.make().to(device, dtype), self.batch()
        return model, (x.to(device, dtype if x.is_floating_point() else x.dtype), y.to(device))


def words(count: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(count, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:].contiguous()


def images(rows: int, size: int, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, channels, size, size, generator=generator),
        torch.randint(10, (rows,), generator=generator),
    )


SMALL = {
    "perceptron": Network(lambda: Perceptron(), lambda: images(64, 28, 1)),
    "transformer": Network(lambda: GPT(64, width=64, heads=4, layers=2, sequence_length=32), lambda: words(64, 8, 32)),
    "resnet": Network(lambda: resnet18(width=8), lambda: images(16, 32)),
}


class Recurrent(nn.Module):
    """Classifies sequences by what a recurrent layer makes of their last numbers."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(12, 32, num_layers=2, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layer(x)[0][:, -1])
        return found


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 20, 12, generator=generator), torch.randint(10, (16,), generator=generator)


# Whose casts under autocast cuDNN makes, of which no machine without a GPU knows.
RECURRENT = {kind.__name__: Network(lambda kind=kind: Recurrent(kind), sequences) for kind in (nn.LSTM, nn.GRU)}


def losses(model: Any, call: Callable[[], torch.Tensor], steps: int = 3, scaler: Any = None) -> list[float]:
    """Of some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        loss = call()
        found.append(float(loss.detach()))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return found


def largest(a: list[float], b: list[float]) -> float:
    """The largest deviation between two lists, relative."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def close(what: str, a: list[float], b: list[float], tolerance: float) -> float:
    """The same, which is to be within the tolerance."""
    found = largest(a, b)
    assert found <= tolerance, f"{what}: {a} and {b} differ by {found:.2g}, more than {tolerance:g}"
    return float(f"{found:.2g}")


@contextmanager
def parallelized(model: nn.Module, batch: Any, **options: Any) -> Iterator[Any]:
    with sw.parallelize(model, loss_fn, batch, batch="global", **options) as parallel:
        assert parallel.plan is not None, "the model was not captured"
        yield parallel


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@step("machine")
def machine(device: torch.device, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    if device.type == "cuda":
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
        print(shown.stdout)
    return found


@step("numbers")
def numbers(device: torch.device, quick: bool) -> dict[str, Any]:
    found = {}
    torch.backends.cudnn.allow_tf32 = False  # which keeps 10 bits of the operands of convolutions
    for name, network in (SMALL | RECURRENT).items():
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            plain, batch = network.made(device, dtype)
            expected = losses(plain, lambda plain=plain, batch=batch: loss_fn(plain, batch))
            model, batch = network.made(device, dtype)
            with parallelized(model, batch) as parallel:
                got = losses(parallel, lambda parallel=parallel, batch=batch: parallel(batch))
            found[f"{name} {dtype}"] = close(f"{name} in {dtype}", got, expected, tolerance)
    return found


@step("against the CPU")
def against_cpu(device: torch.device, quick: bool) -> dict[str, Any]:
    found = {}
    for name, network in SMALL.items():
        plain, batch = network.made(torch.device("cpu"), torch.float64)
        expected = losses(plain, lambda plain=plain, batch=batch: loss_fn(plain, batch))
        model, batch = network.made(device, torch.float64)
        with parallelized(model, batch) as parallel:
            got = losses(parallel, lambda parallel=parallel, batch=batch: parallel(batch))
        found[name] = close(name, got, expected, 1e-8)
    return found


def _autocast(device: torch.device, dtype: torch.dtype, scaled: bool) -> dict[str, Any]:
    found = {}
    for name, network in (SMALL | (RECURRENT if device.type == "cuda" else {})).items():
        outcomes = []
        for ours in (False, True):
            model, batch = network.made(device)
            scaler = torch.amp.GradScaler(device.type) if scaled else None

            def call(model: Any, given: Any, ours: bool = ours) -> torch.Tensor:
                with torch.autocast(device.type, dtype):
                    return model(given) if ours else loss_fn(model, given)

            with torch.autocast(device.type, dtype):
                made = sw.parallelize(model, loss_fn, batch, batch="global") if ours else model
            assert not ours or made.plan is not None, f"{name} was not captured under autocast"
            outcomes.append(losses(made, lambda made=made, batch=batch, call=call: call(made, batch), scaler=scaler))
        found[name] = close(f"{name} in {dtype}", outcomes[1], outcomes[0], 2e-2)
    return found


@step("bf16")
def bf16(device: torch.device, quick: bool) -> dict[str, Any]:
    return _autocast(device, torch.bfloat16, scaled=False)


@step("fp16")
def fp16(device: torch.device, quick: bool) -> dict[str, Any]:
    return _autocast(device, torch.float16, scaled=True)


@step("masks")
def masks(device: torch.device, quick: bool) -> dict[str, Any]:
    from shardwright.compiler.lower.operators import randomness

    cpu, shape = torch.device("cpu"), (37, 1000, 129)
    for place in (((0, 0, 0), shape), ((5, 100, 0), (30, 900, 129)), ((0, 0, 64), (37, 1000, 65))):
        here, there = (randomness.kept(9, 0.1, shape, *place, where) for where in (cpu, device))
        assert torch.equal(here, there.cpu()), f"masks differ at {place}"
        for draw in (randomness.uniform, randomness.fine):
            here, there = (draw(7, shape, *place, where) for where in (cpu, device))
            assert torch.equal(here, there.cpu()), f"{draw.__name__} differs at {place}"
        here, there = (randomness.integers(3, -5, 1 << 40, shape, *place, where) for where in (cpu, device))
        assert torch.equal(here, there.cpu()), f"whole numbers differ at {place}"
    rows = (8, 16, 2048, 2048)
    seconds = timed(lambda: randomness.kept(9, 0.1, rows, (0,) * 4, rows, device), device, 10)
    return {"bits": "equal", "ms for 537 million": round(seconds * 1e3, 2)}


@step("attention")
def attention(device: torch.device, quick: bool) -> dict[str, Any]:
    from shardwright.compiler.lower.operators.attention import one_kernel
    from shardwright.compiler.lower.operators.kernels import attention_with_dropout

    def made(where: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(shape, dtype=torch.float64).to(where, dtype).requires_grad_() for _ in range(3)]

    def run(heads: list[torch.Tensor]) -> list[torch.Tensor]:
        shape = heads[0].shape
        scores = (*shape[:-1], shape[-2])
        result = attention_with_dropout(*heads, None, 0.1, True, None, 5, scores, (0,) * len(shape))
        return [result.detach(), *torch.autograd.grad(result.square().mean(), heads)]

    small = (2, 4, 256, 32)
    pairs = zip(*(run(made(where, small, torch.float64)) for where in (device, torch.device("cpu"))), strict=True)
    worst = max(float((a.cpu() - b).abs().max() / b.abs().max()) for a, b in pairs)
    assert worst <= 1e-10, f"attention differs from the CPU's by {worst:.2g}"
    found: dict[str, Any] = {"beside the CPU": f"{worst:.2g}"}
    if device.type == "cuda":
        for width in (16, 64, 80, 128):
            for dtype in (torch.bfloat16, torch.float16):
                assert one_kernel(device, dtype, width) is not None, f"no kernel for heads of {width} in {dtype}"
        torch.cuda.reset_peak_memory_stats()
        heads = made(device, (8, 16, 2048, 64), torch.bfloat16)
        seconds = timed(lambda: run(heads), device, 5)
        peak = torch.cuda.max_memory_allocated() / 2**30
        assert peak < 2, f"{peak:.2f} GiB for attention of 8x16x2048x2048"
        plain = timed(
            lambda: torch.autograd.grad(
                nn.functional.scaled_dot_product_attention(*heads, dropout_p=0.1, is_causal=True).square().mean(), heads
            ),
            device,
            5,
        )
        found |= {"GiB at 8x16x2048x2048": round(peak, 2), "ms": round(seconds * 1e3, 1)}
        found |= {"ms of torch's own": round(plain * 1e3, 1)}
    return found


@step("optimizer")
def optimizer_steps(device: torch.device, quick: bool) -> dict[str, Any]:
    """AdamW of a parallel model with fused=True, beside torch's loops over the same numbers."""
    width = 64 if quick else 1024
    network = Network(lambda: GPT(64, width=width, heads=4, layers=4, sequence_length=32), lambda: words(64, 4, 32))
    found, after = {}, []
    for way in ("ours", "foreach"):
        model, batch = network.made(device)
        made: Any = model if way == "foreach" else sw.parallelize(model, loss_fn, batch, batch="global")
        optimizer = torch.optim.AdamW(made.parameters(), **{"fused" if way == "ours" else "foreach": True})
        generator = torch.Generator(device).manual_seed(1)
        for parameter in made.parameters():
            parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)
        for _ in range(3):
            optimizer.step()
        after.append([parameter.detach().clone() for parameter in made.parameters()])
        counts = {str(state["step"].device) for state in optimizer.state.values()}
        assert way == "foreach" or counts == {str(after[0][0].device)}, (
            f"steps are counted on {counts}: no fused kernels"
        )
        found[f"ms, {way}"] = round(timed(optimizer.step, device, 10) * 1e3, 2)
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*after, strict=True))
    assert worst <= 1e-5, f"fused steps differ from the loops by {worst:.2g}"
    return found | {"beside the loops": f"{worst:.2g}"}


@step("vocabulary")
def vocabulary(device: torch.device, quick: bool) -> dict[str, Any]:
    """The cross entropy of a large vocabulary, cast some rows at a time, beside one that casts all logits."""
    from shardwright.compiler.capture.operators import cross_entropy_sum

    rows, classes = (64, 32768) if quick else (8192, 128256)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, classes, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()
    target = torch.randint(classes, (rows,), device=device, generator=generator)

    def whole(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), target, reduction="sum")

    def run(loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        return torch.autograd.grad(loss(logits, target) / rows, logits)[0]

    assert torch.equal(run(cross_entropy_sum), run(whole)), "gradients by rows are others than those of all at once"
    found: dict[str, Any] = {}
    for name, loss in (("rows", cross_entropy_sum), ("whole", whole)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found[f"ms, {name}"] = round(timed(lambda loss=loss: run(loss), device, 5) * 1e3, 1)
        if device.type == "cuda":
            found[f"GiB, {name}"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


@step("batch norm")
def batch_norm_of_ranks(device: torch.device, quick: bool) -> dict[str, Any]:
    """The batch norm of all ranks by the kernels of SyncBatchNorm, beside one by operators, in bf16 and float64."""
    from shardwright.compiler.lower.operators import batch_norm

    class Alone:
        """What a rank tells others and hears from them, were it the only one."""

        def all_gather(self, tensor: torch.Tensor, axes: Any) -> torch.Tensor:
            return tensor[None]

        def all_reduce(self, tensor: torch.Tensor, axes: Any) -> torch.Tensor:
            return tensor

    def run(x: torch.Tensor, upstream: torch.Tensor, wide: torch.dtype) -> list[torch.Tensor]:
        affine = [torch.full((x.shape[1],), n, device=device, dtype=wide, requires_grad=True) for n in (2.0, 0.5)]
        running = [torch.zeros(x.shape[1], device=device, dtype=wide) for _ in range(2)]
        counts = [x.numel() // x.shape[1]]
        y, _, _, *new = batch_norm.batch_norm_running(x, *affine, *running, 0.1, 1e-5, Alone(), ("d",), counts)  # type: ignore[arg-type]
        return [y.detach(), *new, *torch.autograd.grad(y, [x, *affine], upstream)]

    found: dict[str, Any] = {}
    shape = (8, 16, 12, 12) if quick else (128, 256, 56, 56)
    for dtype, wide, tolerance in ((torch.float64, torch.float64, 1e-10), (torch.bfloat16, torch.float32, 2e-2)):
        for order in (torch.contiguous_format, torch.channels_last):
            generator = torch.Generator(device).manual_seed(0)
            numbers = [torch.randn(shape, device=device, dtype=wide, generator=generator) for _ in range(2)]
            x, upstream = (n.to(dtype).contiguous(memory_format=order) for n in numbers)
            del numbers
            x.requires_grad_()
            ways = []
            for name, kinds in (("kernels", ("cuda",)), ("operators", ())):
                batch_norm._WITH_KERNELS = kinds  # type: ignore[assignment]
                ways.append(run(x, upstream, wide))
                seconds = timed(lambda x=x, upstream=upstream, wide=wide: run(x, upstream, wide), device, 5)
                found[f"ms, {dtype}, {order}, {name}".replace("torch.", "")] = round(seconds * 1e3, 2)
            batch_norm._WITH_KERNELS = ("cuda",)
            assert ways[0][0].is_contiguous(memory_format=order), "the result lies in another order than the images"
            for ours, theirs in zip(*ways, strict=True):
                apart = float((ours - theirs).abs().max() / theirs.abs().max())
                assert apart <= tolerance, f"kernels and operators differ by {apart:.2g} in {dtype}, {order}"
    return found


@step("steady")
def steady(device: torch.device, quick: bool) -> dict[str, Any]:
    networks = SMALL | {
        "dropout": Network(
            lambda: GPT(64, width=64, heads=4, layers=2, sequence_length=32, dropout=0.1), lambda: words(64, 8, 32)
        )
    }
    found = {}
    for name, network in networks.items():
        model, batch = network.made(device)
        with parallelized(model, batch) as parallel:
            optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, foreach=True)
            for at in range(8):
                if at == 4:
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                parallel(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.set_sync_debug_mode("default")
        found[name] = "no waiting"
    return found


@step("profile")
def profile(device: torch.device, quick: bool) -> dict[str, Any]:
    """Kernels of a step beside plain PyTorch's: their number and time, and by which of them ours is longer."""
    found: dict[str, Any] = {}
    for dropout in (0.0, 0.1):
        network = Network(
            lambda dropout=dropout: GPT(8192, width=1024, heads=16, layers=4, sequence_length=1024, dropout=dropout),
            lambda: words(8192, 8, 1024),
        )
        kernels = {way: _kernels(network, device, way == "ours") for way in ("ours", "plain")}
        for way, events in kernels.items():
            found[f"dropout {dropout}, {way}"] = (
                f"{sum(count for count, _ in events.values())} kernels, {sum(ms for _, ms in events.values()):.2f} ms"
            )
        none = (0, 0.0)
        more = {
            name: (
                ours[0] - kernels["plain"].get(name, none)[0],
                round(ours[1] - kernels["plain"].get(name, none)[1], 2),
            )
            for name, ours in kernels["ours"].items()
        }
        longest = sorted(more.items(), key=lambda item: -item[1][1])[:8]
        found[f"dropout {dropout}, more in ours"] = [f"{c:+d} {ms:+.2f} ms {name}" for name, (c, ms) in longest]
    return found


def _kernels(network: Network, device: torch.device, ours: bool) -> dict[str, tuple[int, float]]:
    """The kernels of one step in bf16 by name: how many, and the milliseconds that they take together."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    model, batch = network.made(device)
    with torch.autocast(device.type, torch.bfloat16):
        made: Any = sw.parallelize(model, loss_fn, batch, batch="global") if ours else model

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = made(batch) if ours else loss_fn(made, batch)
        loss.backward()

    for _ in range(3):
        step()
    with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in trace.events():
        if event.device_type.name == "CUDA":
            count, ms = found.get(event.name[:90], (0, 0.0))
            found[event.name[:90]] = count + 1, ms + event.device_time / 1e3
    return found


@step("saves")
def saves(device: torch.device, quick: bool) -> dict[str, Any]:
    network = Network(
        lambda: GPT(512, width=128 if quick else 1024, heads=8, layers=4, sequence_length=64), lambda: words(512, 8, 64)
    )
    model, batch = network.made(device)
    with parallelized(model, batch) as parallel, tempfile.TemporaryDirectory() as folder:
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)

        def train(steps: int) -> None:
            for _ in range(steps):
                parallel(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

        train(2)
        before = {name: tensor.cpu().clone() for name, tensor in parallel.full_state_dict().items()}
        start = time.perf_counter()
        sw.checkpoint.save(folder, parallel, optimizer, step=2, asynchronous=True)
        held_s = time.perf_counter() - start
        train(5)
        sw.checkpoint.wait(parallel)
        changed = parallel.full_state_dict()
        assert not all(torch.equal(before[name], tensor.cpu()) for name, tensor in changed.items())
        sw.checkpoint.load(folder, parallel, optimizer)
        wrong = [n for n, t in parallel.full_state_dict().items() if not torch.equal(before[n], t.cpu())]
        assert not wrong, f"{wrong[:3]} were saved as later steps have left them"
        return {"ms that the loop was held": round(held_s * 1e3, 1)}


@step("pinned")
def pinned(device: torch.device, quick: bool) -> dict[str, Any]:
    from shardwright.checkpoint.saving.image import _forget_error, room_of

    size = (1 << 28) + 1  # of which torch's own allocator would take twice as much
    memory, source = room_of(size, pinned=True), torch.ones(size, dtype=torch.uint8, device=device)
    assert memory.is_pinned(), "the memory is not pinned"
    a = torch.randn(4096, 4096, device=device)
    for _ in range(20):
        a = a @ a / 64
    start = time.perf_counter()
    memory.copy_(source, non_blocking=True)
    asked_s = time.perf_counter() - start
    torch.cuda.synchronize()
    done_s = time.perf_counter() - start
    assert memory.count_nonzero() == size
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))  # twice: refused by the driver
    assert error, "memory was pinned twice"
    _forget_error()
    assert float((source.sum() * 2).item()) == 2 * size, "a kernel after an error that was told"
    assert asked_s < done_s / 4, f"who asks for a copy waits {asked_s:.3f} of {done_s:.3f} s"
    return {"ms to ask for a copy": round(asked_s * 1e3, 2), "ms until it is there": round(done_s * 1e3, 1)}


@step("meta")
def meta(device: torch.device, quick: bool) -> dict[str, Any]:
    width = 256 if quick else 4096
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    x = torch.randn(8, width, device=device)

    def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sw.set_seed(4)
    parallel = sw.parallelize(model, squares, x, batch="global")
    found: dict[str, Any] = {"MB": whole / 1e6}
    if device.type == "cuda":
        found["MB at most"] = torch.cuda.max_memory_allocated() / 1e6
        assert found["MB at most"] < 1.5 * found["MB"]
    loss = parallel(x)
    loss.backward()
    assert loss.isfinite()
    return found


def timed(call: Callable[[], Any], device: torch.device, times: int) -> float:
    """The median seconds of a call, by events on a GPU."""
    call()
    took = []
    for _ in range(times):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            took.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            took.append(time.perf_counter() - begin)
    return statistics.median(took)


def _speed(network: Network, device: torch.device, quick: bool, compiled: bool = True) -> dict[str, Any]:
    """Milliseconds of a step in bf16: ours beside plain PyTorch, and both compiled, which take turns."""
    rounds, steps = (2, 1) if quick else (5, 10)
    first_s: dict[str, float | str] = {}

    def stepping(way: str) -> Callable[[], None]:
        model, batch = network.made(device)
        with torch.autocast(device.type, torch.bfloat16):
            made: Any = model
            if way.startswith("ours"):
                made = sw.parallelize(model, loss_fn, batch, batch="global", compile=way == "ours compiled")
        called = torch.compile(loss_fn) if way == "compiled" else loss_fn
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, foreach=True)

        def run() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = made(batch) if way.startswith("ours") else called(made, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", NotCompiled)
            for _ in range(3):
                run()
        first_s.update({f"told, {way}": str(one.message) for one in told if one.category is NotCompiled})
        synchronize(device)
        first_s[f"s of the first steps, {way}"] = round(time.perf_counter() - start, 1)
        return run

    ways = {
        way: stepping(way)
        for way in ("ours", "plain", *(["compiled", "ours compiled"] if compiled and not quick else []))
    }
    took: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():

            def in_a_row(run: Callable[[], None] = run) -> None:  # so that nothing waits between two steps
                for _ in range(steps):
                    run()

            took[way].append(timed(in_a_row, device, 1) / steps)
    found = {f"ms, {way}": round(statistics.median(times) * 1e3, 2) for way, times in took.items()}
    for ours, other in (("ours", "plain"), ("ours", "compiled"), ("ours compiled", "compiled")):
        if {ours, other} <= ways.keys():
            ratios = [a / b for a, b in zip(took[ours], took[other], strict=True)]
            found[f"{ours} / {other}"] = round(statistics.median(ratios), 3)
    found |= first_s
    limit = 1.03 if device.type == "cuda" and not quick else float("inf")
    assert found["ours / plain"] <= limit, f"{found}: expected at most {limit} of plain PyTorch"
    return found


@step("speed of a transformer")
def speed_of_transformer(device: torch.device, quick: bool) -> dict[str, Any]:
    if quick:
        return _speed(SMALL["transformer"], device, quick)
    network = Network(
        lambda: GPT(50304, width=1024, heads=16, layers=12, sequence_length=1024), lambda: words(50304, 8, 1024)
    )
    return _speed(network, device, quick)


class Llama(nn.Module):
    """A small Llama of transformers, as its users have it."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        import transformers

        self.network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(input_ids=ids).logits
        return logits


@step("speed of a Llama")
def speed_of_llama(device: torch.device, quick: bool) -> dict[str, Any]:
    if importlib.util.find_spec("transformers") is None:
        return {"left out": "transformers is not installed"}
    if quick:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return _speed(Network(lambda: Llama(**sizes, vocab_size=64), lambda: words(64, 8, 32)), device, quick)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16}
    network = Network(lambda: Llama(**sizes, num_key_value_heads=8), lambda: words(32000, 4, 2048))
    return _speed(network, device, quick)


@step("speed of ResNet-50")
def speed_of_resnet(device: torch.device, quick: bool) -> dict[str, Any]:
    if quick:
        return _speed(SMALL["resnet"], device, quick)
    return _speed(Network(lambda: resnet50(10, "imagenet"), lambda: images(128, 224)), device, quick)


@step("profile of a device")
def profile_of_device(device: torch.device, quick: bool) -> dict[str, Any]:
    """Matrix products, copies and launches here over those of the shipped profile."""
    shipped, size = for_device(device.type), 512 if quick else 8192
    found: dict[str, Any] = {"shipped": shipped.device}
    for dtype in (torch.float32, torch.float64) if quick else (torch.float32, torch.float64, torch.bfloat16):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        rate = 2 * size**3 / timed(lambda a=a, b=b: a @ b, device, 5)
        found[f"{str(dtype).removeprefix('torch.')} over shipped"] = round(rate / shipped.flops_in(dtype), 2)
    x, y = (torch.empty(2**24 if quick else 2**28, device=device) for _ in range(2))
    rate = 2 * x.nbytes / timed(lambda: x.copy_(y), device, 5)
    found["copies over shipped"] = round(rate / shipped.memory_bandwidth, 2)
    one = torch.ones(1, device=device)
    took = timed(lambda: [one.add_(1) for _ in range(1000)], device, 5) / 1000
    return found | {"launches over shipped": round(took / shipped.launch_s, 2)}


def main() -> None:
    name, device, size, answer = sys.argv[1:]
    world = sw.init(backend=None if device == "cuda" else "gloo")
    found = STEPS[name](world.device, size == "quick")
    synchronize(world.device)
    Path(answer).write_text(json.dumps(found))
    print(f"{name}: {found}")


if __name__ == "__main__":
    main()
