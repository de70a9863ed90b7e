"""Every check: those of one host, which `CHECKS` lists, and those between hosts (`between`)."""

from __future__ import annotations

from shardwright.cluster.doctor.checks import environment, gpus, infiniband, machine, network, software

CHECKS = (
    *software.CHECKS, *gpus.CHECKS, *infiniband.CHECKS, *environment.CHECKS, *network.CHECKS,
    *machine.CHECKS,
)  # fmt: skip
