"""A small training job on real gloo, run as `python -m tests.torch.job`: the one place in the tests that needs torch.

Each line of standard input names a scenario and a directory. The job is forked, runs the good steps and the faulty one,
and its ranks write dumps with torch's own recorder while they are stuck; then all are killed, and the answer is `done`.

What gloo of torch 2.13 does, and how it shapes the scenarios:

- It records no send and recv, so no fault of theirs can be shown.
- It marks no call as started or completed: a finished call is `retired`, and so is one that failed. A dump of active
  calls alone is therefore the whole ring.
- A closed connection fails the calls of that process's neighbours. So a rank that dies is frozen first, and one that
  raises lives on as if a thread kept it alive, until the others have dumped.
- A process that receives more than it expects is aborted; it is kept as if it were writing its core, so that the ranks
  around it hang and all can dump. What it receives in another type of the same width it takes.
- Groups made by `backend="gloo"` enter the recorder before they have a name: such dumps list no members.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._inductor.codecache  # the first dump with stack frames imports it: once here, not in every rank
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

from tests.torch.scenarios import (
    FORMS,
    GOOD_STEPS,
    GROUPS,
    HANGS,
    HEALTHY,
    PREFIX,
    STEP,
    UNDECIDED,
    WORLD,
    WORLD_SIZE,
    Call,
    Scenario,
)

DEADLINE = 60.0
DUMP: dict[str, Callable[[], bytes]] = {"pickle": _dump_fr_trace, "json": _dump_fr_trace_json}


def listed_gloo(given: Any, _: object) -> Any:
    """Return a gloo backend that tells the recorder the group's name and members, as that of NCCL does."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._timeout = given.timeout
    options.group_name = given.group_id
    options.global_ranks_in_group = given.global_ranks_in_group
    return dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, options)


class Rank:
    """One rank of the job, in a process of its own; `server` is its pipe to the process that forked it."""

    def __init__(self, rank: int, scenario: Scenario, directory: Path, server: Connection) -> None:
        self._rank = rank
        self._scenario = scenario
        self._directory = directory
        self._server = server
        self._groups: dict[str, Any] = {}

    def connect(self, listener: socket.socket) -> None:
        """Join the process groups; rank 0 serves their store on the listening socket."""
        store = dist.TCPStore(
            *listener.getsockname(),
            is_master=self._rank == 0,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if self._rank == 0 else None,
        )
        backend = "listed_gloo" if self._scenario.listed else "gloo"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=WORLD_SIZE)
        self._groups[WORLD] = dist.group.WORLD
        for desc, groups in GROUPS.items():
            for ranks in groups:
                group = dist.new_group(list(ranks), group_desc=desc)
                if self._rank in ranks:
                    self._groups[desc] = group

    def run(self) -> None:
        """Run the good steps and then what the scenario says of this rank."""
        scenario = self._scenario
        for _ in range(GOOD_STEPS):
            self._complete(STEP)
        calls = scenario.calls[self._rank]
        stops = self._rank in {*scenario.stopped, *scenario.frozen, *scenario.raised}
        self._complete(calls if stops else calls[:-1])
        if self._rank in scenario.raised:
            raise RuntimeError("the batch cannot be loaded")
        last = None if stops else self._issue(calls[-1])
        threading.Thread(target=self._dump_when_asked, args=[int(not stops)], daemon=True).start()
        self._server.send("settled")
        while scenario.running:
            self._complete(STEP)
        if last is not None:
            last.wait()

    def _complete(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._issue(call).wait()

    def _issue(self, call: Call) -> Any:
        group = self._groups[call.group]
        given = torch.ones(call.numel, dtype=getattr(torch, call.dtype))
        if call.operation == "all_reduce":
            return dist.all_reduce(given, group=group, async_op=True)
        if call.operation == "all_gather":
            parts = [torch.empty_like(given) for _ in range(dist.get_world_size(group))]
            return dist.all_gather(parts, given, group=group, async_op=True)
        if call.operation == "all_to_all":
            return dist.all_to_all_single(torch.empty_like(given), given, group=group, async_op=True)
        return dist.barrier(group, async_op=True)

    def _dump_when_asked(self, stuck_in: int) -> None:
        self._server.recv()
        deadline = time.monotonic() + DEADLINE
        # gloo retires a call in a thread of its own, a moment after who waited for it went on.
        while not self._scenario.running and open_calls() != stuck_in:
            if time.monotonic() > deadline:
                self._server.send(f"{open_calls()} open calls")
                return
            time.sleep(0.01)
        for form in FORMS:
            (self._directory / form / f"{PREFIX}{self._rank}").write_bytes(DUMP[form]())
        self._server.send("dumped")


def open_calls() -> int:
    """Return how many calls of this process are not yet retired."""
    return sum(not entry["retired"] for entry in json.loads(_dump_fr_trace_json()).get("entries", []))


def fork(rank: int, scenario: Scenario, directory: Path, listener: socket.socket) -> tuple[int, Connection]:
    """Fork one rank; return its process ID and the pipe to it."""
    here, there = Pipe()
    pid = os.fork()
    if pid:
        there.close()
        return pid, here
    here.close()
    try:
        this = Rank(rank, scenario, directory, there)
        this.connect(listener)
        this.run()
    except BaseException:  # noqa: BLE001  nothing may leave the fork
        traceback.print_exc()
        there.send("raised")
    while True:
        signal.pause()


def expect(message: str, rank: int, pipe: Connection) -> None:
    """Wait for a message of a rank.

    Raises:
        RuntimeError: it said something else, or nothing.
    """
    said = pipe.recv() if pipe.poll(DEADLINE) else "nothing"
    if said != message:
        raise RuntimeError(f"rank {rank} said {said!r}, not {message!r}")


def run_job(scenario: Scenario, directory: Path) -> None:
    """Run a job until its ranks are where the scenario leaves them, have them dump, and kill them."""
    for form in FORMS:
        (directory / form).mkdir()
    ranks: list[tuple[int, Connection]] = []
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for rank in range(WORLD_SIZE):
                ranks.append(fork(rank, scenario, directory, listener))
        for rank, (_, pipe) in enumerate(ranks):
            expect("raised" if rank in scenario.raised else "settled", rank, pipe)
        for rank in scenario.frozen:
            os.kill(ranks[rank][0], signal.SIGSTOP)
        for rank, (_, pipe) in enumerate(ranks):
            if rank not in {*scenario.frozen, *scenario.raised}:
                pipe.send("dump")
                expect("dumped", rank, pipe)
    finally:
        for pid, pipe in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()


def main() -> None:
    """Run the scenarios that standard input asks for."""
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, libc.pause)
    dist.Backend.register_backend("listed_gloo", listed_gloo, extended_api=True, devices=["cpu"])
    scenarios = {scenario.name: scenario for scenario in [*HANGS, *HEALTHY, *UNDECIDED]}
    for line in sys.stdin:
        name, directory = line.rstrip("\n").split(" ", 1)
        run_job(scenarios[name], Path(directory))
        print("done", flush=True)


if __name__ == "__main__":
    main()
