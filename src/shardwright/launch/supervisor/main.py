"""The beginning of a supervisor: from its first order to ranks that run, or to a rank that is one of them."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback

from shardwright.common.pulse import PULSE_VARIABLE, answer_with_stacks
from shardwright.launch.host.folders import make_temporary, remove_folder
from shardwright.launch.host.processes import become_subreaper, die_with_parent
from shardwright.launch.host.protocol import ORDERS, Order, Start
from shardwright.launch.host.stream import Decoder, take_stdio
from shardwright.launch.hosts.gpus import count_gpus
from shardwright.launch.supervisor import rank_start, zygote
from shardwright.launch.supervisor.rank_start import RankProcess
from shardwright.launch.supervisor.supervisor import Supervisor

_CHUNK_BYTES = 1 << 16


def _read_start(orders: int, decoder: Decoder[Start | Order]) -> Start:
    """Return the launcher's first order; end where it ended before the kernel was asked to signal that."""
    poll = select.poll()
    poll.register(orders, 0)
    while data := os.read(orders, _CHUNK_BYTES):
        for order in decoder.feed(data):
            if poll.poll(0):
                os._exit(1)
            assert isinstance(order, Start), f"{order} came before a start"
            return order
    os._exit(1)


def main() -> None:
    """Supervise what the launcher orders on standard input; in a forked rank, run its program and return."""
    die_with_parent(signal.SIGKILL)  # as long as there is no rank that needs somebody to end it
    become_subreaper()
    decoder: Decoder[Start | Order] = Decoder(Start, *ORDERS)
    orders, events = take_stdio()
    start = _read_start(orders, decoder)
    pulses = rank_start.open_pulses(start, events)
    if start.carrier:
        # From a zip file this would be compiled each time, and few jobs need it.
        from shardwright.launch.supervisor.mpirun_ranks import supervise

        supervise(start, orders, events, decoder, pulses)
    preload = start.preload and zygote.can_preload(start.program)
    if preload:
        try:
            zygote.preload(start.program, packed=start.packed)
        except BaseException:
            rank_start.not_started(events, rank_start.why_no_torch(traceback.format_exc()))
    die_with_parent(0)
    ranks: dict[int, RankProcess] = {}
    rank_start.check_open_files(start, events)
    steps, writing = rank_start.open_steps(start)
    private = [orders, events, *start.held, *(pulse.fd for pulse in pulses.values()), *steps.values(), *writing]
    supervisor = os.getpid()
    temporary = make_temporary(start.ranks.values())
    for rank, variables in start.ranks.items():
        try:
            process, pipes = rank_start.start_rank(private)
        except OSError as error:
            if temporary is not None:
                remove_folder(temporary)
            rank_start.not_started(
                events, f"rank {rank} of {len(start.ranks)} on this host could not be forked: {error}"
            )
        if process.pid == 0:
            rank_start.become_rank(supervisor, variables, pipes, [*private, *pipes.values()])
            if start.bind:
                rank_start.bind(variables, count_gpus(os.environ))
            program = start.program.for_rank(variables)
            if not preload:
                rank_start.execute(program.command_line())
            if PULSE_VARIABLE in variables:
                answer_with_stacks(variables[PULSE_VARIABLE])
            if start.packed:
                rank_start.forget_this_package()
            return zygote.run(program)
        for fd in pipes.values():
            os.close(fd)
        process.error_file = rank_start.error_file(variables)
        process.pulse = pulses.get(rank)
        if rank in steps:
            process.pipes[rank_start.STEPS] = steps[rank]
        ranks[rank] = process
    Supervisor(orders, events, decoder, ranks, start.lease_s, start.scratch, start.stall_s, temporary).run()
    sys.exit(0)
