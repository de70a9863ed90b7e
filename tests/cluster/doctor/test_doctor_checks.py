"""Each check on a recorded host as it was, with something wrong, and with something that cannot be read."""

import subprocess
from functools import cache
from pathlib import Path

import pytest
from recorded_hosts import GPUS, LINKS, altered, recorded

from shardwright.cluster.doctor import sources
from shardwright.cluster.doctor.checks import CHECKS
from shardwright.cluster.doctor.finding import Severity, examine
from shardwright.cluster.doctor.reading import CommandResult

IB, NET, CPU = "/sys/class/infiniband/mlx5_0/ports/1", "/sys/class/net", "/sys/devices/system/cpu/cpu0/cpufreq"
OK, NOTE, UNKNOWN, WARNING, PROBLEM = Severity
GIB = 1 << 30
FAILED = CommandResult(1, "", "Failed to initialize NVML: Driver/library version mismatch\n")
CAPABILITY = " ".join(sources.NVIDIA_CAPABILITY)
DRIVER = "/sys/bus/pci/devices/0000:07:00.0"

NO_GPUS = {  # as in a container that has the programs of the driver, but not the devices
    "commands": {
        GPUS: CommandResult(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "")
    },
    "files": {f"{DRIVER}/vendor": "0x1002"},
}
NO_IB = {f"{IB}/state": "1: DOWN", f"{IB.replace('_0', '_1')}/state": "1: DOWN"}
ROUTES = (  # of /proc/net/route
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    "eth1\t00000000\t0100A8C0\t0003\t0\t0\t200\t00000000\t0\t0\t0\n"
    "eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    "eth0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"
)
BRIDGE = [["docker0", "172.17.0.1", 0], ["eth0", "10.0.0.1", 100000]]
DOCKER = {f"{NET}/docker0/operstate": "up", f"{NET}/docker0/mtu": "1500", f"{NET}/docker0/type": "1"}


def row(errors="0", driver="535.129.03", mode="Enabled"):
    return {GPUS: f"0, NVIDIA A100-SXM4-80GB, {driver}, {mode}, {errors}\n"}


def capable(*capabilities, built=None, driver="535.129.03"):
    """GPUs of these compute capabilities, and what torch was built for."""
    rows = [f"{index}, NVIDIA A100-SXM4-80GB, {driver}, Enabled, 0\n" for index in range(len(capabilities))]
    said = [f"{index}, {capability}\n" for index, capability in enumerate(capabilities)]
    facts = {} if built is None else {"torch_architectures": built}
    return {"commands": {GPUS: "".join(rows), CAPABILITY: "".join(said)}, "facts": facts}


def packages(**versions):
    return {"packages": {name.replace("_", "-"): version for name, version in versions.items()}}


# group/check -> (severity, words of the finding, words of what to type, what is different on the host)
CASES = [
    ("software/Python", OK, "3.11.9, /opt", "", {}),
    ("software/Python", PROBLEM, "Python 3.8.10, expected 3.11", "install -y python3.11 python3.11-venv",
     {"facts": {"python": "3.8.10"}}),
    ("software/Python", UNKNOWN, "did not say its python", "", {"facts": {"python": None}}),
    ("software/torch", OK, "2.13.0+cu126, built for CUDA 12.6", "", {}),
    ("software/torch", PROBLEM, "not installed", "/opt/train/bin/python -m pip install torch", {"facts": packages()}),
    ("software/torch", PROBLEM, "torch 1.13.1, expected 2.11", "--upgrade torch", {"facts": packages(torch="1.13.1")}),
    ("software/torch", UNKNOWN, "'dev' is no version", "", {"facts": packages(torch="dev")}),
    ("software/shardwright", OK, "0.1.0, sources 0123", "", {}),
    ("software/shardwright", WARNING, "not installed", "pip install shardwright", {"facts": packages()}),
    ("software/shardwright", UNKNOWN, "did not say its code", "", {"facts": {"code": None}}),
    ("software/MPI", OK, "mpirun (Open MPI) 4.1.2", "", {}),
    ("software/MPI", NOTE, "no mpirun", "sudo apt-get install -y openmpi-bin",
     {"commands": {"mpirun --version": None}}),
    ("software/MPI", UNKNOWN, "names no version", "", {"commands": {"mpirun --version": "?"}}),
    ("GPUs/driver", OK, "535.129.03, 4 x NVIDIA A100-SXM4-80GB", "", {}),
    ("GPUs/driver", NOTE, "no NVIDIA GPU", "", {"commands": {GPUS: None}, "files": {f"{DRIVER}/vendor": "0x1002"}}),
    ("GPUs/driver", PROBLEM, "1 GPU on the PCI bus, but there is no nvidia-smi", "nvidia-headless-570-server",
     {"commands": {GPUS: None}}),
    ("GPUs/driver", PROBLEM, "updated since the machine was started", "sudo reboot", {"commands": {GPUS: FAILED}}),
    ("GPUs/driver", NOTE, "no NVIDIA GPU here; nvidia-smi fails: NVIDIA-SMI has failed", "", NO_GPUS),
    ("GPUs/driver", PROBLEM, "1 GPU on the PCI bus, but nvidia-smi fails", "nvidia-headless-570-server",
     {"commands": {GPUS: NO_GPUS["commands"][GPUS]}}),
    ("GPUs/CUDA", OK, "", "", NO_GPUS),
    ("GPUs/persistence", OK, "", "", NO_GPUS),
    ("GPUs/driver", UNKNOWN, "nvidia-smi says 'No devices'", "", {"commands": {GPUS: "No devices\n"}}),
    ("GPUs/CUDA", OK, "has CUDA 12.2, torch was built for 12.6", "", {}),
    ("GPUs/CUDA", PROBLEM, "driver 470.57.02 has CUDA 11.4, and runs no torch that shardwright takes: 2.11 and newer "
     "are built for CUDA 12.6 at least, which needs driver 525.60.13 or newer",
     "nvidia-headless-570-server", {"commands": row(driver="470.57.02")}),
    ("GPUs/CUDA", PROBLEM, "driver 470.57.02 has CUDA 11.4, and runs no torch", "nvidia-headless-570-server",
     {"commands": row(driver="470.57.02"), "facts": {"torch_cuda": "11.8"}}),
    ("GPUs/CUDA", PROBLEM, "driver 470.57.02 has CUDA 11.4, and runs no torch", "nvidia-headless-570-server",
     {"commands": row(driver="470.57.02"), "facts": {"torch_cuda": None}}),
    ("GPUs/CUDA", PROBLEM, "driver 535.129.03 has CUDA 12.2, torch was built for 13.0, which needs driver 580.65.06",
     "# or: /opt/train/bin/python -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
     {"facts": {"torch_cuda": "13.0"}}),
    ("GPUs/architecture", OK, "compute capability 8.0, as torch has", "", {}),
    ("GPUs/architecture", OK, "compute capability 7.0, 8.6", "", capable("7.0", "8.6")),
    ("GPUs/architecture", OK, "compute capability 12.0", "", capable("12.0", built=["sm_90", "compute_90"])),
    ("GPUs/architecture", OK, "", "", {"commands": row(driver="470.57.02")}),
    ("GPUs/architecture", PROBLEM, "GPU 0, 1 (NVIDIA A100-SXM4-80GB) has compute capability 7.0, and this torch has "
     "kernels for sm_75, sm_80, sm_90a alone: none would run", "whl/cu126",
     capable("7.0", "7.0", built=["sm_75", "sm_80", "sm_90a"], driver="580.65.06")),
    ("GPUs/architecture", PROBLEM, "GPU 1 (NVIDIA A100-SXM4-80GB) has compute capability 12.0", "whl/cu130",
     capable("9.0", "12.0", driver="580.65.06")),
    ("GPUs/architecture", PROBLEM, "GPU 0 (NVIDIA A100-SXM4-80GB) has compute capability 12.0",
     "nvidia-headless-580-server", capable("12.0")),
    ("GPUs/architecture", PROBLEM, "3.7, and this torch has kernels for sm_50, sm_60, sm_70, sm_75, sm_80, sm_86, "
     "sm_90 alone: none would run; no torch from 2.11 on has any", "CUDA_VISIBLE_DEVICES=", capable("3.7")),
    ("GPUs/architecture", UNKNOWN, "torch did not say", "", {"facts": {"torch_architectures": None}}),
    ("GPUs/architecture", UNKNOWN, "expected a GPU as sm_90", "", {"facts": {"torch_architectures": ["gfx90a"]}}),
    ("GPUs/architecture", UNKNOWN, "expected index, compute capability", "", {"commands": {CAPABILITY: "0 [N/A]\n"}}),
    ("GPUs/CUDA", PROBLEM, "built without CUDA, but there are 4 GPUs", "whl/cu126", {"facts": {"torch_cuda": None}}),
    ("GPUs/CUDA", UNKNOWN, "'new' is no version", "", {"commands": row(driver="new")}),
    ("GPUs/NCCL", OK, "2.27.5, loads", "", {}),
    ("GPUs/NCCL", PROBLEM, "NCCL 2.27.5 does not load: libcudart.so.12: cannot open", "nvidia-nccl-cu12==2.27.5",
     {"facts": {"nccl": {"package": "nvidia-nccl-cu12", "version": "2.27.5", "loads": False,
                         "said": "Traceback\nlibcudart.so.12: cannot open shared object file\n"}}}),
    ("GPUs/NCCL", PROBLEM, "nvidia-nccl-cu12 2.27.5 is for another CUDA than torch's 13.0", "nvidia-nccl-cu13",
     {"facts": {"torch_cuda": "13.0"}}),
    ("GPUs/NCCL", WARNING, "2.27.5, loads; but nvidia-nccl-cu11 is installed too",
     "pip uninstall -y nvidia-nccl-cu11",
     {"facts": packages(nvidia_nccl_cu11="2.21.5", nvidia_nccl_cu12="2.27.5")}),
    ("GPUs/NCCL", UNKNOWN, "another form than expected", "", {"facts": {"nccl": ["2.27.5"]}}),
    ("GPUs/nvcc", OK, "CUDA 12.4", "", {}),
    ("GPUs/nvcc", NOTE, "no nvcc", "cuda-toolkit-12-6", {"commands": {"nvcc --version": None}}),
    ("GPUs/nvcc", WARNING, "nvcc is of CUDA 11.7, torch of 12.6", "cuda-toolkit-12-6",
     {"commands": {"nvcc --version": "Cuda compilation tools, release 11.7, V11.7.64"}}),
    ("GPUs/nvcc", UNKNOWN, "names no release", "", {"commands": {"nvcc --version": "?"}}),
    ("GPUs/persistence", OK, "on, 4 GPUs", "", {}),
    ("GPUs/persistence", WARNING, "off on GPU 0", "sudo nvidia-smi -pm 1", {"commands": row(mode="Disabled")}),
    ("GPUs/persistence", UNKNOWN, "nvidia-smi says", "", {"commands": {GPUS: "0, 1\n"}}),
    ("GPUs/memory errors", OK, "no errors that could not be corrected", "", {}),
    ("GPUs/memory errors", OK, "these GPUs have none", "", {"commands": row(errors="[N/A]")}),
    ("GPUs/memory errors", PROBLEM, "2 memory errors", "sudo nvidia-smi -i 0 --gpu-reset",
     {"commands": row(errors="2")}),
    ("GPUs/memory errors", UNKNOWN, "nvidia-smi says", "", {"commands": row(errors="many")}),
    ("GPUs/links", OK, "links: NV12", "", {}),
    ("GPUs/links", NOTE, "1 pairs without NVLink across sockets (SYS), as GPU0 and GPU1", "nvidia-smi topo -m",
     {"commands": {LINKS: "\t\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n"}}),
    ("GPUs/links", UNKNOWN, "has no rows of GPUs", "", {"commands": {LINKS: "?"}}),
    ("NPUs/health", NOTE, "no NPU here", "", {}),
    ("NPUs/health", PROBLEM, "8 NPUs, but no npu-smi", "ls /usr/local/Ascend", {"facts": {"davinci": 8}}),
    ("NPUs/health", UNKNOWN, "no rows of NPUs", "", {"commands": {"npu-smi info": "DrvMngGetConsoleLogLevel failed"}}),
    ("InfiniBand/ports", OK, "mlx5_0/1 ACTIVE, 200 Gb/sec (4X HDR), InfiniBand, ib0 192.168.1.1; mlx5_1/1", "", {}),
    ("InfiniBand/ports", WARNING, "is mlx5_0/1 to be down?", "ibstat", {"files": {f"{IB}/state": "1: DOWN"}}),
    ("InfiniBand/ports", PROBLEM, "waits for a subnet manager", "enable --now opensm",
     {"files": {f"{IB}/state": "2: INIT"}}),
    ("InfiniBand/ports", UNKNOWN, "says 'ACTIVE', expected one like", "", {"files": {f"{IB}/state": "ACTIVE"}}),
    ("InfiniBand/ports", UNKNOWN, "state cannot be read: Permission denied", "",
     {"unreadable": {f"{IB}/state": "Permission denied"}}),
    ("InfiniBand/rates", OK, "2 ports at 200 Gb/sec", "", {}),
    ("InfiniBand/rates", WARNING, "mlx5_0/1 (100 Gb/sec (4X EDR)) slower than 200", "ibstat",
     {"files": {f"{IB}/rate": "100 Gb/sec (4X EDR)"}}),
    ("InfiniBand/rates", UNKNOWN, "the rate 'fast' is no number", "", {"files": {f"{IB}/rate": "fast"}}),
    ("InfiniBand/GPU memory", OK, "is loaded", "", {}),
    ("InfiniBand/GPU memory", WARNING, "is not loaded", "sudo modprobe nvidia_peermem",
     {"files": {"/sys/module/nvidia_peermem/refcnt": None}}),
    ("InfiniBand/GPU memory", UNKNOWN, "cannot be read", "",
     {"unreadable": {"/sys/module/nvidia_peermem/refcnt": "EIO"}}),
    ("InfiniBand/NCCL", OK, "NCCL would use mlx5_0:1,mlx5_1:1", "export NCCL_IB_HCA==mlx5_0:1,mlx5_1:1", {}),
    ("InfiniBand/NCCL", OK, "NCCL would use", "export NCCL_SOCKET_IFNAME==ib0", {}),
    ("InfiniBand/NCCL", OK, "NCCL would use", "export GLOO_SOCKET_IFNAME=ib0", {}),
    ("InfiniBand/NCCL", NOTE, "NCCL would use TCP, for want of InfiniBand", "",
     {"files": NO_IB, "facts": {"addresses": [["eth0", "10.0.0.1", 100000]]}}),
    ("InfiniBand/NCCL", NOTE, "by one of eth0, docker0; eth0 has the default route: launch sets what says so",
     "export NCCL_SOCKET_IFNAME==eth0",
     {"files": NO_IB | DOCKER | {"/proc/net/route": ROUTES}, "facts": {"addresses": BRIDGE}}),
    ("InfiniBand/NCCL", NOTE, "eth0 leads to the other hosts", "export GLOO_SOCKET_IFNAME=eth0",
     {"files": NO_IB | DOCKER, "facts": {"addresses": BRIDGE, "leads_out": "eth0"}}),
    ("InfiniBand/NCCL", NOTE, "which of them leads to other hosts is not known here", "",
     {"files": NO_IB | DOCKER, "facts": {"addresses": BRIDGE}}),
    ("InfiniBand/NCCL", OK, "NCCL would use", "export NCCL_SOCKET_IFNAME==eth0",
     {"files": DOCKER | {"/proc/net/route": ROUTES}, "facts": {"addresses": BRIDGE}}),
    ("InfiniBand/NCCL", UNKNOWN, "expected one like", "", {"files": {f"{IB}/state": ""}}),
    ("environment/variables", OK, "none that hurts, of 1", "", {}),
    ("environment/variables", WARNING, "NCCL_P2P_DISABLE=1: GPUs of one host do not talk", "unset NCCL_P2P_DISABLE",
     {"facts": {"environment": {"NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "4"}}}),
    ("environment/variables", WARNING, "OMP_NUM_THREADS=512", "unset OMP_NUM_THREADS",
     {"facts": {"environment": {"OMP_NUM_THREADS": "512"}}}),
    ("environment/variables", UNKNOWN, "did not say its environment", "", {"facts": {"environment": None}}),
    ("environment/device names", OK, "some that exist", "", {}),
    ("environment/device names", PROBLEM, "NCCL_SOCKET_IFNAME==eth1 names none of eth0, ib0, lo",
     "unset NCCL_SOCKET_IFNAME", {"facts": {"environment": {"NCCL_SOCKET_IFNAME": "=eth1"}}}),
    ("environment/device names", PROBLEM, "GLOO_SOCKET_IFNAME=eth names none", "unset GLOO_SOCKET_IFNAME",
     {"facts": {"environment": {"GLOO_SOCKET_IFNAME": "eth"}}}),
    ("environment/device names", UNKNOWN, "cannot be read", "", {"unreadable": {f"{NET}/eth0/operstate": "EIO"}}),
    ("environment/library path", OK, "torch does not mind", "", {}),
    ("environment/library path", WARNING, "/gone cannot be entered; /old/libnccl.so.2 goes before what torch brings",
     "export LD_LIBRARY_PATH='/good dir'", {"facts": {"library_folders": [
         {"path": "/gone", "error": "No such file or directory", "libraries": []},
         {"path": "/old", "error": None, "libraries": ["libnccl.so.2", "libnccl.so.2.11.4"]},
         {"path": "/good dir", "error": None, "libraries": ["libmpi.so.40"]}]}}),
    ("environment/library path", UNKNOWN, "another form", "", {"facts": {"library_folders": ["/a"]}}),
    ("network/interfaces", OK, "eth0 10.0.0.1 100 Gb/s MTU 1500; ib0 192.168.1.1 MTU 2044", "", {}),
    ("network/interfaces", WARNING, "no interface has an address; up are: eth0, ib0", "ip address",
     {"facts": {"addresses": []}}),
    ("network/interfaces", UNKNOWN, "says 'big', expected a number", "", {"files": {f"{NET}/eth0/mtu": "big"}}),
    ("network/own name", OK, "dgx is 10.0.0.1", "", {}),
    ("network/own name", NOTE, "dgx is 127.0.1.1 here: mpirun and others may tell",
     r"sudo sed -i -E '/^(127\.|::1)/s/\sdgx(\s|$)/\1/' /etc/hosts",
     {"facts": {"own_name": ["127.0.1.1"]}}),
    ("network/own name", WARNING, "nobody here knows the address", "echo '10.0.0.1 dgx' | sudo tee -a /etc/hosts",
     {"facts": {"own_name": None}}),
    ("network/own name", UNKNOWN, "did not say its name", "", {"facts": {"name": None}}),
    ("network/ports", OK, "32768 to 60999", "", {}),
    ("network/ports", WARNING, "only the ports 60000 to 60999", "sudo sysctl -w",
     {"files": {"/proc/sys/net/ipv4/ip_local_port_range": "60000\t60999"}}),
    ("network/ports", UNKNOWN, "expected two numbers", "",
     {"files": {"/proc/sys/net/ipv4/ip_local_port_range": "all"}}),
    ("network/logins", OK, "ssh and sshd, alice", "", {}),
    ("network/logins", WARNING, "no ssh", "openssh-client", {"facts": {"programs": ["sshd"]}}),
    ("network/logins", UNKNOWN, "did not say its programs", "", {"facts": {"programs": None}}),
    ("limits/open files", OK, "1048576 open files, unlimited processes", "", {}),
    ("limits/open files", WARNING, "at most 1024 open files", "ulimit -n 65536",
     {"facts": {"limits": {"open files": [1024, 1024], "processes": [-1, -1]}}}),
    ("limits/open files", UNKNOWN, "did not say its limits", "", {"facts": {"limits": None}}),
    ("limits/locked memory", OK, "unlimited", "", {}),
    ("limits/locked memory", PROBLEM, "64 KiB may be locked, InfiniBand needs", "sudo tee /etc/security/limits.d",
     {"facts": {"limits": {"locked": [65536, 65536]}}}),
    ("limits/locked memory", UNKNOWN, "did not say its limits", "", {"facts": {"limits": []}}),
    ("limits/shared memory", OK, "GiB free in /dev/shm", "", {}),
    ("limits/shared memory", WARNING, "0.1 GiB of 0.1 GiB free", "sudo mount -o remount,size=50% /dev/shm",
     {"facts": {"disks": {"/dev/shm": [64 << 20, 64 << 20]}}}),
    ("limits/shared memory", PROBLEM, "there is no /dev/shm", "sudo mount -t tmpfs", {"facts": {"disks": {}}}),
    ("limits/shared memory", UNKNOWN, "did not say its disks", "", {"facts": {"disks": None}}),
    ("limits/disks", OK, "850.0 GiB in /tmp", "", {}),
    ("limits/disks", WARNING, "little room: 5.0 GiB in /my disk", "du -xh --max-depth=1 '/my disk'",
     {"facts": {"disks": {"/my disk": [5 * GIB, 90 * GIB]}}}),
    ("limits/disks", PROBLEM, "little room: 0.5 GiB in /tmp", "du -xh",
     {"facts": {"disks": {"/tmp": [GIB // 2, GIB]}}}),
    ("limits/disks", UNKNOWN, "another form", "", {"facts": {"disks": {"/tmp": "full"}}}),
    ("machine/memory", OK, "1962.8 of 2015.5 GiB available", "", {}),
    ("machine/memory", WARNING, "1.0 of 20.0 GiB", "ps -eo",
     {"files": {"/proc/meminfo": "MemTotal: 20971520 kB\nMemAvailable: 1048576 kB\n"}}),
    ("machine/memory", UNKNOWN, "another form", "", {"files": {"/proc/meminfo": "plenty"}}),
    ("machine/cores", OK, "128 of 128 cores, 2 NUMA nodes", "", {}),
    ("machine/cores", NOTE, "8 of 128 cores", "taskset -cp $$", {"facts": {"cpus": 8}}),
    ("machine/cores", UNKNOWN, "did not say its cpus", "", {"facts": {"cpus": None}}),
    ("machine/NUMA", OK, "pages stay", "", {}),
    ("machine/NUMA", WARNING, "moves pages between", "numa_balancing=0",
     {"files": {"/proc/sys/kernel/numa_balancing": "1"}}),
    ("machine/NUMA", UNKNOWN, "expected a number", "", {"files": {"/proc/sys/kernel/numa_balancing": "on"}}),
    ("machine/governor", OK, "performance on 2 cores", "", {}),
    ("machine/governor", WARNING, "1 of 2 cores are at powersave", "echo performance | sudo tee",
     {"files": {f"{CPU}/scaling_governor": "powersave"}}),
    ("machine/governor", UNKNOWN, "cannot be read: Input/output error", "",
     {"unreadable": {f"{CPU}/scaling_governor": "Input/output error"}}),
    ("machine/clock", OK, "set by a time server", "", {}),
    ("machine/clock", NOTE, "not set by a time server", "apt-get install -y chrony",
     {"commands": {"timedatectl show -p NTPSynchronized --value": "no\n"}}),
    ("machine/clock", UNKNOWN, "expected yes or no", "",
     {"commands": {"timedatectl show -p NTPSynchronized --value": "perhaps\n"}}),
]  # fmt: skip
BY_NAME = {f"{check.group}/{check.name}": check for check in CHECKS}


@cache
def dgx():
    return recorded("dgx")


def found(name, changes):
    return examine(BY_NAME[name], altered(dgx(), **changes)).finding


@pytest.mark.parametrize(
    ("name", "severity", "words", "line", "changes"), CASES, ids=[f"{case[0]}-{case[1].name}" for case in CASES]
)
def test_a_check(name, severity, words, line, changes):
    finding = found(name, changes)
    assert (finding.severity, words in finding.text) == (severity, True), finding
    assert any(line in typed for typed in finding.remedy) if line else severity != PROBLEM


def test_every_check_has_a_good_a_bad_and_an_unreadable_case():
    for name in BY_NAME:
        seen = {severity for case, severity, *_ in CASES if case == name}
        assert UNKNOWN in seen, name
        assert seen & {WARNING, PROBLEM, NOTE}, name
        assert OK in seen or name == "NPUs/health", name


def test_npus_and_infiniband_are_found_by_what_their_tools_print():
    host = recorded("ascend")
    health, ports = (examine(BY_NAME[name], host).finding for name in ("NPUs/health", "InfiniBand/ports"))
    assert (health.severity, health.text) == (OK, "2 x 910A, npu-smi 21.0.4")
    assert (ports.severity, ports.text) == (OK, "mlx5_0/1 Active, 100 Gb/sec, InfiniBand, ib0 192.168.1.7")
    said = host.commands["npu-smi info"].out.replace("1     910A           | OK     ", "1     910A           | Warning")
    worse = examine(BY_NAME["NPUs/health"], altered(host, commands={"npu-smi info": said})).finding
    assert (worse.severity, worse.text) == (PROBLEM, "NPU 1 says Warning")


def test_what_is_to_be_typed_can_be_pasted(tmp_path: Path):
    """A shell understands every line."""
    lines = [line for name, _, _, _, changes in CASES for line in found(name, changes).remedy]
    (tmp_path / "lines.sh").write_text("\n".join(lines))
    done = subprocess.run(["sh", "-n", tmp_path / "lines.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
