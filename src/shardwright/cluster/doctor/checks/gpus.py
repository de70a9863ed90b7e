"""Checks of NVIDIA GPUs, with the driver, CUDA and NCCL that go together, and of Ascend NPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.cluster.doctor import sources
from shardwright.cluster.doctor.checks.software import install, numbers, pip
from shardwright.cluster.doctor.finding import Check, Finding, Severity, not_applicable, note, ok, problem, warning
from shardwright.cluster.doctor.reading import CommandResult, HostReading, Unreadable
from shardwright.common.words import plain
from shardwright.launch.carriers.agent_connection import WHEELS

# The newest CUDA of a branch of the driver, as nvidia-smi shows it beside the driver.
# Source: NVIDIA CUDA Toolkit release notes, table "CUDA Toolkit and Corresponding Driver Versions",
# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/
DRIVER_CUDA = {
    410: (10, 0), 418: (10, 1), 440: (10, 2), 450: (11, 0), 455: (11, 1), 460: (11, 2), 465: (11, 3), 470: (11, 4),
    495: (11, 5), 510: (11, 6), 515: (11, 7), 520: (11, 8), 525: (12, 0), 530: (12, 1), 535: (12, 2), 545: (12, 3),
    550: (12, 4), 555: (12, 5), 560: (12, 6), 565: (12, 7), 570: (12, 8), 575: (12, 9), 580: (13, 0), 590: (13, 1),
}  # fmt: skip
# The oldest driver on which all of a major version of CUDA runs ("minor version compatibility").
# Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
# The wheels that there are of every torch that this package takes, newest first, with the oldest driver that runs them:
# those for CUDA 11 ended with torch 2.7.
_WHEELS = ((OLDEST_DRIVER[13], "cu130"), (OLDEST_DRIVER[12], "cu126"))
_BRANCH = {11: "570", 12: "570", 13: "580"}
# The compute capabilities of GPUs that wheels have kernels for, the first and the last.
# Source: https://github.com/pytorch/pytorch/issues/157517, https://github.com/pytorch/pytorch/blob/main/RELEASE.md
_CAPABILITIES = {"cu126": ((5, 0), (9, 0)), "cu130": ((7, 5), (99, 9))}
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_NO_ECC = ("[N/A]", "N/A", "[Not Supported]")


@dataclass(frozen=True)
class Gpu:
    """A row of nvidia-smi's answer; ``errors`` are those that ECC could not correct, None where there is no ECC."""

    index: int
    name: str
    driver: str
    persistent: bool
    errors: int | None


def gpus(reading: HostReading) -> tuple[Gpu, ...]:
    """Return nvidia-smi's GPUs, none where it fails for want of any. Raises `Unreadable` where it fails otherwise."""
    ran = reading.command(sources.NVIDIA_QUERY)
    if ran is None or (_fails(ran) and on_the_bus(reading) == 0):
        return ()
    return tuple(_rows(reading.ran(sources.NVIDIA_QUERY) or ""))


def _fails(ran: CommandResult) -> bool:
    """Return whether nvidia-smi fails otherwise than by the update of a driver that is loaded."""
    return ran.code != 0 and "version mismatch" not in ran.last_words()


def _rows(text: str) -> Iterator[Gpu]:
    for line in filter(str.strip, text.splitlines()):
        words = [word.strip() for word in line.split(",")]
        if len(words) != 5 or not words[0].isdecimal() or (words[4] not in _NO_ECC and not words[4].isdecimal()):
            raise Unreadable(f"nvidia-smi says {plain(line, 60)!r}, expected index, name, driver, persistence, errors")
        errors = None if words[4] in _NO_ECC else int(words[4])
        yield Gpu(int(words[0]), words[1], words[2], words[3] == "Enabled", errors)


def on_the_bus(reading: HostReading) -> int:
    """Return the number of GPUs of NVIDIA on the PCI bus, whether there is a driver or not."""
    vendors = reading.glob("/sys/bus/pci/devices/*/vendor")
    kinds = reading.glob("/sys/bus/pci/devices/*/class")
    return sum(
        vendor == _NVIDIA and kinds.get(path.removesuffix("vendor") + "class", "").startswith(_DISPLAY)
        for path, vendor in vendors.items()
    )


def driver(reading: HostReading) -> Finding:
    """Check that there is a driver where there are GPUs, and that it answers."""
    ran = reading.command(sources.NVIDIA_QUERY)
    if ran is None or _fails(ran):
        why = "there is no nvidia-smi" if ran is None else f"nvidia-smi fails: {ran.last_words()}"
        if (count := on_the_bus(reading)) == 0:
            return note("no NVIDIA GPU here" if ran is None else f"no NVIDIA GPU here; {why}")
        major = _torch_cuda(reading)[:1] or (12,)
        return problem(
            f"{count} GPU{'s' * (count != 1)} on the PCI bus, but {why}",
            *install(reading, "driver", _BRANCH.get(major[0], "580")),
        )
    if ran.code != 0:
        what = "the driver in the kernel is not that of the libraries: it was updated since the machine was started"
        return problem(what, reading.as_root("reboot"))
    found = gpus(reading)
    if not found:
        return problem("nvidia-smi answers, but knows no GPU", "nvidia-smi -L", reading.as_root("dmesg | grep -i nvrm"))
    kinds = ", ".join(f"{sum(g.name == name for g in found)} x {name}" for name in dict.fromkeys(g.name for g in found))
    return ok(f"{found[0].driver}, {kinds}")


def _torch_cuda(reading: HostReading) -> tuple[int, ...]:
    cuda = reading.facts.get("torch_cuda")
    return numbers(cuda) if isinstance(cuda, str) else ()


def newest_cuda(version: str) -> tuple[int, int]:
    """Return the newest CUDA that a driver knows itself, by its branch.

    >>> newest_cuda("470.57.02")
    (11, 4)
    """
    branch = numbers(version)[0]
    known = [number for number in DRIVER_CUDA if number <= branch]
    if not known:
        raise Unreadable(f"driver {version} is older than all that are known here")
    return DRIVER_CUDA[max(known)]


def cuda(reading: HostReading) -> Finding:
    """Compare the driver with the CUDA that torch was built for."""
    if not (found := gpus(reading)):
        return not_applicable()
    version, built = found[0].driver, _torch_cuda(reading)
    if (wheel := _wheel(version)) is None:
        what = f"driver {version} has CUDA {_dotted(newest_cuda(version))}, and runs no torch that shardwright takes: "
        need = (
            f"2.11 and newer are built for CUDA 12.6 at least, which needs driver {_padded(OLDEST_DRIVER[12])} or newer"
        )
        return problem(what + need, *install(reading, "driver", _BRANCH[12]))
    fitting = _install(reading, wheel)
    if not built:
        return problem(f"torch was built without CUDA, but there are {len(found)} GPUs", fitting)
    newest = newest_cuda(version)
    says = f"driver {version} has CUDA {newest[0]}.{newest[1]}, torch was built for {_dotted(built)}"
    oldest = OLDEST_DRIVER.get(built[0])
    if oldest is None:
        raise Unreadable(f"torch was built for CUDA {_dotted(built)}, of which no driver is known here")
    if numbers(version) < oldest:
        need = f"{says}, which needs driver {_padded(oldest)} or newer"
        return problem(need, *install(reading, "driver", _BRANCH.get(built[0], "580")), f"# or: {fitting}")
    return ok(says)


def _wheel(driver: str) -> str | None:
    """Return the newest wheel of torch that a driver runs; None where it runs none of those that are taken."""
    return next((name for oldest, name in _WHEELS if numbers(driver) >= oldest), None)


def _install(reading: HostReading, wheel: str) -> str:
    return pip(reading, "install", "--force-reinstall", "torch", "--index-url", f"{WHEELS}/{wheel}")


def _padded(driver: tuple[int, ...]) -> str:
    return ".".join(f"{part:02}" for part in driver)


def architectures(reading: HostReading) -> Finding:
    """Compare the compute capability of each GPU with what the kernels of torch were built for."""
    if not (found := gpus(reading)) or cuda(reading).severity != Severity.OK:
        return not_applicable()
    built = reading.facts.get("torch_architectures")
    if not isinstance(built, list) or not built:
        raise Unreadable("torch did not say for which GPUs it was built (torch.cuda.get_arch_list())")
    capabilities = dict(_capabilities(reading.ran(sources.NVIDIA_CAPABILITY) or ""))
    without = [gpu for gpu in found if not any(_runs(str(name), capabilities[gpu.index]) for name in built)]
    if not without:
        return ok(
            f"compute capability {', '.join(sorted({_dotted(of) for of in capabilities.values()}))}, as torch has"
        )
    worst = capabilities[without[0].index]
    what = (
        f"GPU {_listed([gpu.index for gpu in without])} ({without[0].name}) has compute capability {_dotted(worst)}, "
        f"and this torch has kernels for {', '.join(map(str, built))} alone: none would run"
    )
    fitting = [wheel for wheel in _WHEELS if _CAPABILITIES[wheel[1]][0] <= worst <= _CAPABILITIES[wheel[1]][1]]
    if not fitting:
        return problem(f"{what}; no torch from 2.11 on has any", "export CUDA_VISIBLE_DEVICES=")
    oldest, wheel = next((wheel for wheel in fitting if numbers(found[0].driver) >= wheel[0]), fitting[0])
    newer = () if numbers(found[0].driver) >= oldest else install(reading, "driver", str(oldest[0]))
    return problem(what, *newer, _install(reading, wheel))


def _capabilities(said: str) -> Iterator[tuple[int, tuple[int, int]]]:
    for line in filter(str.strip, said.splitlines()):
        if (match := re.fullmatch(r"\s*(\d+), (\d+)\.(\d+)\s*", line)) is None:
            raise Unreadable(f"nvidia-smi says {plain(line, 60)!r}, expected index, compute capability")
        yield int(match[1]), (int(match[2]), int(match[3]))


def _runs(built: str, capability: tuple[int, int]) -> bool:
    """Return whether a GPU runs kernels that were built so.

    Those of ``sm_80`` run on its later minors, and so do those of ``sm_100f``; of ``sm_90a`` on that GPU alone; what is
    kept as ``compute_80`` is made into kernels for any later GPU.

    >>> _runs("sm_80", (8, 6)), _runs("sm_90", (8, 6)), _runs("sm_90a", (9, 1)), _runs("compute_90", (12, 0))
    (True, False, False, True)
    """
    if (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", built)) is None:
        raise Unreadable(f"torch says {plain(built, 40)!r}, expected a GPU as sm_90")
    of = int(match[2]), int(match[3])
    if match[4] == "a":
        return of == capability
    return of <= capability and (of[0] == capability[0] or (match[1] == "compute" and not match[4]))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version[:2]))


def nvcc(reading: HostReading) -> Finding:
    """Check the toolkit, which only those need who compile kernels."""
    said, built = reading.ran(sources.NVCC), _torch_cuda(reading)
    lines = install(reading, "nvcc", cuda="-".join(map(str, built[:2]))) if built else ()
    if said is None:
        return note("no nvcc; only who compiles kernels needs it", *lines)
    if (match := re.search(r"release (\d+\.\d+)", said)) is None:
        raise Unreadable("`nvcc --version` names no release")
    if built and numbers(match[1])[0] != built[0]:
        return warning(
            f"nvcc is of CUDA {match[1]}, torch of {_dotted(built)}: kernels compiled here may not load", *lines
        )
    return ok(f"CUDA {match[1]}")


def persistence(reading: HostReading) -> Finding:
    """Check that the persistence mode of every GPU is on."""
    if not (found := gpus(reading)):
        return not_applicable()
    if off := [gpu.index for gpu in found if not gpu.persistent]:
        what = f"off on GPU {_listed(off)}: the driver is loaded anew for each job, which takes seconds"
        return warning(what, reading.as_root("nvidia-smi -pm 1"))
    return ok(f"on, {len(found)} GPUs")


def ecc(reading: HostReading) -> Finding:
    """Check that no GPU has had memory errors that could not be corrected."""
    if not (found := gpus(reading)):
        return not_applicable()
    if bad := [gpu.index for gpu in found if gpu.errors]:
        count = sum(gpu.errors or 0 for gpu in found)
        what = (
            f"{count} memory errors that could not be corrected, on GPU {_listed(bad)}; if they come again, replace it"
        )
        return problem(what, *(reading.as_root(f"nvidia-smi -i {index} --gpu-reset") for index in bad))
    without = all(gpu.errors is None for gpu in found)
    return ok("these GPUs have none" if without else "no errors that could not be corrected")


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices))


def topology(reading: HostReading) -> Finding:
    """Check the links of GPUs by `nvidia-smi topo -m`: NV# is NVLink, SYS goes from socket to socket."""
    if len(gpus(reading)) < 2:
        return not_applicable()
    if (said := reading.ran(sources.NVIDIA_TOPOLOGY)) is None:
        raise Unreadable("`nvidia-smi topo -m` was not asked")
    links = list(_links(said))
    if not links:
        raise Unreadable("`nvidia-smi topo -m` has no rows of GPUs")
    worst = [f"GPU{a} and GPU{b}" for a, b, word in links if word == "SYS"]
    kinds = ", ".join(dict.fromkeys(word for _, _, word in links))
    if worst:
        what = f"{len(worst)} pairs without NVLink across sockets (SYS), as {worst[0]}; links: {kinds}"
        return note(what, "nvidia-smi topo -m")
    return ok(f"links: {kinds}")


def _links(said: str) -> Iterator[tuple[int, int, str]]:
    """Yield each pair of GPUs once. The first line names the columns, which are separated by tabs."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in said.splitlines()]
    rows = [line.split() for line in lines if re.match(r"\s*GPU\d+\s", line)]
    body = [row for row in rows if "X" in row]
    for a, row in enumerate(body):
        for b in range(a + 1, len(body)):
            yield a, b, row[1 + b]


def nccl(reading: HostReading) -> Finding:
    """Check that the NCCL of torch's CUDA is there and can be loaded."""
    built, found = _torch_cuda(reading), reading.facts.get("nccl")
    if not built:
        return not_applicable()
    wanted_name = sources.nccl_package(built[0])
    if found is None:
        return note(
            "no package of NCCL is installed: torch brings its own, or none", pip(reading, "install", wanted_name)
        )
    package, version = str(found["package"]), str(found["version"])
    if package != wanted_name:
        return problem(
            f"{package} {version} is for another CUDA than torch's {_dotted(built)}",
            pip(reading, "install", wanted_name),
        )
    again = pip(reading, "install", "--force-reinstall", "--no-deps", f"{wanted_name}=={version}")
    if not found["loads"]:
        why = plain(str(found["said"]).strip().splitlines()[-1] if str(found["said"]).strip() else "no reason", 120)
        return problem(f"NCCL {version} does not load: {why}", again)
    if others := [name for name in sources.NCCL_PACKAGES if name != package and reading.package(name)]:
        what = f"{version}, loads; but {', '.join(others)} is installed too, whose files have the same names"
        return warning(what, pip(reading, "uninstall", "-y", *others), again)
    return ok(f"{version}, loads")


# | 0     910A           | OK            | 70.9        42                15   / 15            |
_DEVICE = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*([A-Za-z]+)\s*\|", re.MULTILINE)
_VERSION = re.compile(r"npu-smi\s+(\S+)")


def npus(reading: HostReading) -> Finding:
    """Check the health that each NPU reports."""
    devices, said = reading.fact("davinci", int), reading.ran(sources.NPU)
    if said is None:
        if devices == 0:
            return note("no NPU here")
        path = "/usr/local/Ascend/driver/tools"
        return problem(f"{devices} NPUs, but no npu-smi on the PATH: is the driver installed?", f"ls {path}")
    found = _DEVICE.findall(said)
    version = _VERSION.search(said)
    if version is None or not found:
        raise Unreadable("`npu-smi info` has no rows of NPUs")
    if bad := [(index, health) for index, _, health in found if health != "OK"]:
        what = ", ".join(f"NPU {index} says {health}" for index, health in bad)
        return problem(what, *(f"npu-smi info -t health -i {index}" for index, _ in bad))
    kinds = ", ".join(dict.fromkeys(plain(name) for _, name, _ in found))
    return ok(f"{len(found)} x {kinds}, npu-smi {version[1]}")


CHECKS = (
    Check("GPUs", "driver", driver),
    Check("GPUs", "CUDA", cuda),
    Check("GPUs", "architecture", architectures),
    Check("GPUs", "NCCL", nccl),
    Check("GPUs", "nvcc", nvcc),
    Check("GPUs", "persistence", persistence),
    Check("GPUs", "memory errors", ecc),
    Check("GPUs", "links", topology),
    Check("NPUs", "health", npus),
)
