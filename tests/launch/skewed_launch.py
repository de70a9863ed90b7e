"""Launch with a host of which the clock is wrong: ``python skewed_launch.py HOST SECONDS -H ... PROGRAM ...``.

What is sent to that host is told that time.time() is something else, which its agent and its supervisor believe.
"""

import os
import sys

from shardwright.launch.carriers.packed import pack, sources
from shardwright.launch.carriers.ssh import SshCarrier
from shardwright.launch.hosts.hosts import Host
from shardwright.launch.joblog.job import create_job_folder
from shardwright.launch.options.launch_options import read_options
from shardwright.launch.options.request import HostRequest, LaunchRequest
from shardwright.launch.remote import RemoteAttempts
from shardwright.launch.restarts import run_job

SKEWED, AHEAD_S, HOSTS = sys.argv[1], float(sys.argv[2]), sys.argv[3]
PATCH = f"""
import time
_true_time = time.time
time.time = lambda: _true_time() + {AHEAD_S}
"""


class SkewedCarrier(SshCarrier):
    def pack_for(self, host: Host) -> tuple[bytes, bytes]:
        files = sources()
        if host.name == SKEWED:
            files["shardwright/__init__.py"] += PATCH.encode()
        return pack(files)


request = LaunchRequest(
    kind="program", arguments=sys.argv[4:], preload=False, tee="none", grace_s=2.0,
    where=HostRequest(hosts=HOSTS, lease_s=10.0),
)  # fmt: skip
options = read_options(request)
assert options.remote is not None
folder = create_job_folder(options.log_dir, options.job)
attempts = RemoteAttempts(options, options.remote, SkewedCarrier)
code = run_job(options.restarts, folder, attempts, lambda: None)
sys.stdout.flush()
os._exit(code)
