"""A machine that is recorded is found as it was found itself."""

import runpy
from pathlib import Path

from recorded_hosts import read_recorded

from shardwright.cluster.doctor import probe
from shardwright.cluster.doctor.checks import CHECKS
from shardwright.cluster.doctor.finding import examine
from shardwright.cluster.doctor.reading import HostReading

SCRIPT = Path(__file__).parents[3] / "scripts/record_host.py"


def test_what_is_recorded_of_this_machine_is_found_as_on_it():
    answer = probe.look()
    answer["commands"]["npu-smi info"] = {"code": None, "out": "", "err": 'it "did" not end\x7f\n'}
    answer["commands"]["nvcc --version"] = {"code": 0, "out": "release 12.4, \x1b[1mé\n", "err": ""}
    answer["facts"]["library_folders"] = [{"path": "/a", "error": None, "libraries": ["libmpi.so"]}]
    text = runpy.run_path(str(SCRIPT))["record"]("box", answer)
    here, recorded = HostReading.of("box", answer).changed(name="box"), read_recorded(text)
    assert [examine(check, recorded) for check in CHECKS] == [examine(check, here) for check in CHECKS]
    assert recorded.commands["npu-smi info"].code is None
