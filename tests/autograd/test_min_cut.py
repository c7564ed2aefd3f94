"""The cheapest cut, beside networkx."""

from __future__ import annotations

import math
import random

import networkx
import pytest

from onepass.autograd.min_cut import Network


def _random_graph(seed: int) -> tuple[int, list[tuple[int, int, float]]]:
    draw = random.Random(seed)
    count = draw.randint(3, 30)
    pairs = [draw.sample(range(count), 2) for _ in range(draw.randint(count, 5 * count))]
    rooms = [math.inf, 0.0, 1.0, 2.0, 3.5, 7.0, 1.0, 2.0]
    edges = [(a, b, draw.choice(rooms)) for a, b in pairs if b != 0 and a != 1 and (a, b) != (0, 1)]
    return count, edges


def _cheapest(count: int, edges: list[tuple[int, int, float]]) -> float | None:
    total: dict[tuple[int, int], float] = {}
    for a, b, room in edges:
        total[a, b] = total.get((a, b), 0.0) + room
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(count))
    for (a, b), room in total.items():
        graph.add_edge(a, b, **({} if room == math.inf else {"capacity": room}))
    try:
        return float(networkx.minimum_cut_value(graph, 0, 1))
    except networkx.NetworkXUnbounded:
        return None


@pytest.mark.parametrize("seed", range(100))
def test_a_cut_is_as_cheap_as_networkx_finds(seed: int) -> None:
    count, edges = _random_graph(seed)
    network = Network()
    for _ in range(count - 2):
        network.node()
    for edge in edges:
        network.edge(*edge)
    cheapest = _cheapest(count, edges)
    if cheapest is None:
        with pytest.raises(ValueError, match="no cut"):
            network.cut()
        return
    side = network.cut()
    assert not side[0] and side[1]
    assert sum(room for a, b, room in edges if not side[a] and side[b]) == pytest.approx(cheapest)


def test_room_may_grow_after_a_cut() -> None:
    """What was found is where the search goes on."""
    network = Network()
    middle = network.node()
    first, second = network.edge(0, middle, 1.0), network.edge(middle, 1, 2.0)
    assert network.cut() == [False, True, True]
    network.room[first] += 5.0
    assert network.cut() == [False, True, False]
    assert network.room[second] == 0.0
