"""Long work over several processes: each job has a time limit, and a crash costs one job, not the run.

`run_jobs(next_job, handler, ...)` yields (job, result) as they finish. A handler is named "module:function"
and takes one job; a result is what it returned, or `Failure` where it hung or died.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")
START_SECONDS = 300.0  # until a process has imported what it needs, however busy the machine is


@dataclass(frozen=True)
class Failure:
    """A job without a result: why."""

    why: str


def _serve(connection: Connection, handler_name: str) -> None:
    module, function = handler_name.split(":")
    handler = getattr(importlib.import_module(module), function)
    connection.send(None)  # it is here
    while True:
        job = connection.recv()
        try:
            connection.send(handler(job))
        except Exception:
            connection.send(Failure(traceback.format_exc(limit=-8)))


class _Worker:
    def __init__(self, handler: str) -> None:
        self.connection, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(other, handler), daemon=True)
        self.process.start()
        other.close()
        self.job: Any = None
        self.seconds = 0.0  # for the job
        self.here = False
        self.deadline = time.monotonic() + START_SECONDS

    def give(self, job: Any, seconds: float) -> None:
        self.job, self.seconds = job, seconds
        self.connection.send(job)
        if self.here:
            self.deadline = time.monotonic() + seconds

    def received(self) -> tuple[Any] | None:
        """A result; None: the process has started, and its job's time begins."""
        if not self.here:
            self.connection.recv()
            self.here, self.deadline = True, time.monotonic() + self.seconds
            return None
        return (self.connection.recv(),)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def run_jobs(
    next_job: Callable[[], Any], handler: str, workers: int, job_seconds: float, stop_at: float | None = None
) -> Iterator[tuple[Any, Any]]:
    """Results in the order they come. `next_job` gives None when there is none now; none starts after `stop_at`."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    pool = [_Worker(handler) for _ in range(workers)]
    busy: list[_Worker] = []
    idle = list(pool)
    try:
        while True:
            while idle and (stop_at is None or time.monotonic() < stop_at):
                job = next_job()
                if job is None:
                    break
                worker = idle.pop()
                worker.give(job, job_seconds)
                busy.append(worker)
            if not busy:
                return
            ready = wait([w.connection for w in busy], timeout=1.0)
            for worker in list(busy):
                outcome = _outcome(worker, worker.connection in ready)
                if outcome is None:
                    continue
                busy.remove(worker)
                yield worker.job, outcome[0]
                if outcome[1]:
                    worker.stop()
                    pool.remove(worker)
                    worker = _Worker(handler)
                    pool.append(worker)
                idle.append(worker)
    finally:
        for worker in pool:
            worker.stop()


def _outcome(worker: _Worker, ready: bool) -> tuple[Any, bool] | None:
    """(result, whether the process must be replaced), None while the job runs."""
    if ready:
        try:
            found = worker.received()
            # What raised may have left a GPU that no longer answers.
            return None if found is None else (found[0], isinstance(found[0], Failure))
        except (EOFError, ConnectionResetError):
            worker.process.join()
            return Failure(f"the process died with exit code {worker.process.exitcode}"), True
    if time.monotonic() > worker.deadline:
        return Failure("no answer within the time limit"), True
    return None


def progress(line: str) -> None:
    """One line that overwrites itself on a terminal, nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line[:150]}", end="", file=sys.stderr, flush=True)
