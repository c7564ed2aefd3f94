"""A compiled graph as one cache entry: host program, kernel sources, explanation.

The kernels' machine code is stored apart, by its own key, so that graphs share it; a lost or damaged one
is built again from the source kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.host_json import MalformedProgram, encode_tree, host_from_json, host_to_json, read_tree
from ..ir.record import CompileRecord
from ..ir.source import HostProgram, KernelSource
from .cache import Cache


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """What a hit gives back. `nodes` are the FX nodes' names then, to attach today's names and lines."""

    host: HostProgram
    kernels: tuple[KernelSource, ...]
    record: CompileRecord
    nodes: tuple[str, ...] = ()


def entry_to_json(entry: GraphEntry, constants: Sequence[Any] = ()) -> Any:
    """The entry as plain data; None where the graph has no written form.

    `constants` are all tensors of the graph in its order: those the program uses are stored as positions.
    """
    positions = [next((n for n, c in enumerate(constants) if c is used), None) for used in entry.host.constants]
    if not entry.host.cacheable or None in positions:
        return None
    try:
        return {
            "host": host_to_json(entry.host),
            "kernels": [encode_tree(k) for k in entry.kernels],
            "record": entry.record.to_json(),
            "nodes": list(entry.nodes),
            "constants": positions,
        }
    except ValueError:  # an argument without a JSON form
        return None


def entry_from_json(data: Any, constants: Sequence[Any] = ()) -> GraphEntry:
    """The entry that `entry_to_json` wrote, with the constants of the graph at hand; else `MalformedProgram`."""
    try:
        used = tuple(constants[position] for position in data["constants"])
        host, record = host_from_json(data["host"], used), CompileRecord.from_json(data["record"])
        kernels = tuple(read_tree(k, KernelSource) for k in data["kernels"])
        return GraphEntry(host, kernels, record, tuple(data["nodes"]))
    except (LookupError, TypeError, AttributeError) as error:
        raise MalformedProgram(f"not a graph: {error!r}") from error


def save_graph(cache: Cache, key: str, entry: GraphEntry, constants: Sequence[Any] = ()) -> bool:
    """Store the entry; False where the graph has no written form or the cache cannot be written."""
    data = entry_to_json(entry, constants)
    return data is not None and cache.write("graphs", key, data)


def load_graph(cache: Cache, key: str, constants: Sequence[Any] = ()) -> GraphEntry | None:
    """The entry stored under the key, with the constants of the graph at hand.

    One that cannot be understood is removed.
    """
    data = cache.read("graphs", key)
    if data is None:
        return None
    try:
        return entry_from_json(data, constants)
    except MalformedProgram:
        cache.discard("graphs", key)
        return None
