"""Tables of addresses and numbers on a GPU, for launches of many kernels.

A table never changes: it is found again by its words, and a call whose tensors lie elsewhere makes another one. So
nothing that still runs, and no captured graph, sees a table of other addresses. Captured copies read host memory when
they are replayed: what a capture made or used stays for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

ALIGNMENT = 16  # of all addresses; else the launch takes the variant for any
MOST_TABLES = 16  # of a launch, between which its calls alternate
_captured: list[tuple[torch.Tensor, torch.Tensor]] = []


class DeviceTables:
    """The tables of one launch. `rest`: the words that are the same in all; `addresses`: how many come first."""

    def __init__(self, device: str, rest: Sequence[int], addresses: int) -> None:
        self.device, self.rest, self.addresses = torch.device(device), tuple(rest), addresses
        self._known: OrderedDict[tuple[tuple[int, ...], int], tuple[torch.Tensor, torch.Tensor, int]] = OrderedDict()

    def __call__(self, words: tuple[int, ...], stream: int) -> int:
        """The address of the table with these words, written on a stream."""
        capturing = torch.cuda.is_current_stream_capturing()
        found = None if capturing else self._known.get((words, stream))
        if found is None:
            found = self._made(words)
            if capturing:
                _captured.append(found[:2])
            else:
                self._known[words, stream] = found
                if len(self._known) > MOST_TABLES:
                    self._known.popitem(last=False)
        return found[2]

    def _made(self, words: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """A new table. Where an address is not aligned, neither is the table's: the launcher looks at that."""
        odd = any(w % ALIGNMENT for w in words[: self.addresses])
        host = torch.tensor(((0,) if odd else ()) + words + self.rest, dtype=torch.int64, device="cpu")
        host = host.pin_memory() if self.device.type == "cuda" else host
        table = torch.empty(len(host), dtype=torch.int64, device=self.device)
        table.copy_(host, non_blocking=True)
        return host, table, table.data_ptr() + (8 if odd else 0)
