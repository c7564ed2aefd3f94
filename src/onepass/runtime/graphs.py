"""A compiled graph that runs as a CUDA graph where it can, and as before where it cannot, with the reason recorded.

The first calls of new sizes run as before (`WARM`): kernels are loaded and the library chooses its algorithms. The next
one is recorded; later ones launch the recording. There is one for each stream, set of sizes and set of addresses at
which the library reads its inputs. An input that keeps moving is copied instead.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch

from ..ir.record import CompileRecord
from .executable import Executable
from .graph_driver import GraphDriver
from .graph_parts import LATER, NotRecordable, Parts, take_apart
from .graph_text import DrawnWriter, RecordWriter, ReplayWriter, Slots
from .recording import Recorder, Recording
from .threads import fork_safe_lock

WARM = 2  # calls of each thread with new sizes that run as before
MOST_RECORDINGS = 8  # kept; the oldest goes
MOST_RECORDED = 64  # ever; a program that needs more gains nothing
MOST_FAILURES = 2
# Addresses that the library may read an input at before it is copied; a parameter may have been replaced.
MOST_ADDRESSES, MOST_PARAMETER_ADDRESSES = 2, 8
_alone = fork_safe_lock()  # one recording at a time


class Graphs:
    """`call(args)` runs the executable's program, as a CUDA graph where that can be.

    `mode`: "on" or "auto"; `device_us`: what its kernels and calls are predicted to take;
    `dynamic`: inputs whose shapes change. `record.graph` always says how it runs.
    """

    def __init__(
        self, executable: Executable, driver_of: Callable[[int], GraphDriver], mode: str, record: CompileRecord,
        device_us: float = 0.0, dynamic: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._executable, self._driver_of, self._mode, self._record = executable, driver_of, mode, record
        self._device_us, self._dynamic = device_us, set(dynamic)
        self._recordings: dict[Any, Recording] = {}
        self._warm: dict[Any, int] = {}
        self._addresses: dict[str, list[int]] = {}
        self._moving: list[str] = []
        self._recorded = self._failures = 0
        self._host_us = float("inf")
        self._run: Callable[[list[Any]], Any] = executable.call
        self.call = lambda args: self._run(args)
        self.call._boxed_call = True  # type: ignore[attr-defined]
        self._namespace: dict[str, Any] = {}
        try:
            self._parts: Parts = take_apart(executable.host)
            self._write()
            record.graph = LATER
        except NotRecordable as error:
            self._stop(str(error))

    def _write(self) -> None:
        """Both functions, for the inputs that move now."""
        e, slots = self._executable, Slots()
        fixed = [n for n in self._parts.read if n not in self._moving]
        recording = RecordWriter(e.host, e.kernels, self._parts, slots, self._moving)
        replaying = ReplayWriter(e.host, e.kernels, self._parts, slots, fixed, self._dynamic)
        self._recordings = {}
        text = recording.source()
        self._fixed, self._slots = fixed, slots
        self._steps: Callable[..., None] = recording.compiled(text)
        replaying.namespace |= {
            "off": False, "executable": e, "plain": e.call, "recordings": self._recordings,
            "missing": partial(self._missing, slots),
            "without": self._without, "failed": self._failed,
        }  # fmt: skip
        self.source = f"{text}\n\n{(replay := replaying.source())}"
        self._namespace, self._run = replaying.namespace, replaying.compiled(replay)

    def _stop(self, reason: str) -> None:
        """No graphs from now on."""
        self._namespace["off"] = True
        self._run = self._executable.call
        self._recordings.clear()
        self._record.graph = f"none: {reason}"

    def _without(self, args: list[Any]) -> Any:
        """A call without a graph, timed on the host."""
        started = time.perf_counter()
        results = self._executable.call(args)
        self._host_us = min(self._host_us, 1e6 * (time.perf_counter() - started))
        return results

    def _missing(self, slots: Slots, sizes: tuple[Any, ...], lie: tuple[int, ...], args: list[Any]) -> Recording | None:
        """A recording for these sizes and addresses; None where this call runs without. `slots`: of who asks."""
        if not _alone.acquire(blocking=False):
            return None
        try:
            if slots is not self._slots or self._namespace["off"] or self._is_moving(lie, args):
                return None
            who = (threading.get_ident(), sizes)
            self._warm[who] = self._warm.get(who, 0) + 1
            if self._warm[who] <= WARM or not self._is_worth_it():
                return None
            if self._recorded >= MOST_RECORDED:
                self._stop(f"sizes and addresses changed {MOST_RECORDED} times")
                return None
            return self._recorded_call(sizes, lie, args)
        finally:
            _alone.release()

    def _is_moving(self, lie: tuple[int, ...], args: list[Any]) -> bool:
        """Note where the library's inputs lie; whether one of them is copied from now on."""
        if len(self._warm) > 8 * MOST_RECORDINGS:
            self._warm.clear()
        given = dict(zip(self._executable.host.inputs, args, strict=True))
        moves: list[str] = []
        for name, address in zip(self._fixed, lie, strict=True):
            seen = self._addresses.setdefault(name, [])
            if address not in seen:
                seen.append(address)
            most = MOST_PARAMETER_ADDRESSES if isinstance(given[name], torch.nn.Parameter) else MOST_ADDRESSES
            if len(seen) > most:
                moves.append(name)
        if written := self._parts.written & set(moves):
            self._stop(f"a call of the library writes {len(written)} inputs that move")
        elif moves:
            self._moving += moves
            self._write()
        return bool(moves)

    def _is_worth_it(self) -> bool:
        if self._mode == "on" or self._device_us < self._host_us:
            return True
        self._stop(f"launching takes {self._host_us:.0f} us, less than the device ({self._device_us:.0f} us predicted)")
        return False

    def _recorded_call(self, sizes: tuple[Any, ...], lie: tuple[int, ...], args: list[Any]) -> Recording | None:
        collects = gc.isenabled()
        gc.disable()  # what is freed meanwhile could be no part of a capture
        try:
            recording = self._record_now(sizes[0], args)
        except NotRecordable as error:
            self._stop(str(error))
        except Exception as error:
            self._forget_error()
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                first = (str(error) or type(error).__name__).splitlines()[0]
                self._stop(f"recording failed: {type(error).__name__}: {first}")
        else:
            while len(self._recordings) >= MOST_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            self._recordings[sizes, lie] = recording
            self._recorded += 1
            self._describe(recording)
            return recording
        finally:
            if collects:
                gc.enable()
        return None

    def _record_now(self, stream: int, args: list[Any]) -> Recording:
        named = torch.device(self._parts.device)
        device = torch.device("cuda", named.index or 0) if named.type == "cuda" else named
        driver = self._driver_of(device.index or 0)
        recorder = Recorder(driver, driver.pool(stream), device, len(self._slots.numbers))
        with ExitStack() as inside:
            self._steps(args, recorder, lambda: inside.enter_context(recorder))
        return Recording(recorder)

    def _forget_error(self) -> None:
        """CUDA reports an error again to whoever asks next."""
        if self._parts.device.startswith("cuda"):
            for _ in range(2):
                with suppress(Exception):
                    torch.zeros(1, device=self._parts.device)

    def _describe(self, recording: Recording) -> None:
        r = recording.recorder
        steps = f"{sum(s.launchable is not None for s in r.steps)} kernels, {r.calls} calls of the library"
        copied = f", {r.copied_bytes} bytes copied for the library" if r.copied_bytes else ""
        times = f", recorded {self._recorded} times" if self._recorded > 1 else ""
        kept = f"{r.pool.bytes} bytes of buffers that all graphs of a stream share"
        self._record.graph = f"one launch for {steps}{copied}; {kept}{times}"

    def _failed(self, status: int, inputs: list[Any], drawn: list[Any]) -> Any:
        """A launch that the driver refused: the same call without a graph, with the numbers that were drawn for it."""
        self._stop(f"launching failed with driver error {status}")
        e = self._executable
        writer = DrawnWriter(e.host, e.kernels, ranges=True)
        writer.namespace["drawn"] = iter(drawn)
        return writer.compiled(writer.source())(inputs)
