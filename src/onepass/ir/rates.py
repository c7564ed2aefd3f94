"""How a chip runs kernels, in numbers that no data sheet has: one table per chip, fitted to measured times.

`price.py` and `library_price.py` read these. `python -m benchmarks.calibrate` fits them on the chip at hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """`source`: where the numbers come from. Times in microseconds; costs in multiply-adds of one lane."""

    source: str
    # --- a program's steps ---
    load_us: float = 0.3  # of a step that loads
    fold_us: float = 0.25  # of a fold across threads
    issue_us: float = 0.0014  # of one operation of a thread
    start_us: float = 0.08  # between two programs that start on one processor
    pipelined: float = 0.5  # of a step, where its loads run ahead
    # --- registers of a thread ---
    live_registers: float = 0.7  # for a live value: some are computed again, or stay narrow
    base_registers: float = 20.0  # for addresses
    ahead_registers: float = 16.0  # for loads that run ahead
    # --- memory and caches ---
    busy_warps: float = 4.0  # that keep a processor's lanes busy
    own_share: float = 3.0  # times its share of the bandwidth that a processor draws where others idle
    cache_part: float = 0.11  # of the shared cache that running programs find again
    cache_adds: float = 0.15  # of the shorter of memory's and the cache's time
    page: float = 50.0  # bytes that a stretch of neighbours costs beyond its own
    access_cost: float = 6.0  # of one instruction that loads or stores
    digit_cost: float = 6.0  # of a quotient or a remainder in an offset
    copied_cache: float = 0.75  # of the time of reads from the shared cache, where hardware copies matrices
    # --- matrix products, as parts of the rate that matmuls of the library reach ---
    matrix: float = 1.3  # of two matrices that hardware copies to shared memory
    computed: float = 0.59  # of that, where threads load or compute one of them
    nested: float = 0.78  # where a product is computed anew in each step of a sweep
    one_ahead: float = 0.68  # where only one load runs ahead
    narrow: float = 0.87  # where the second matrix has the fewest columns
    exact: float = 1 / 45  # on float32 operands that no matrix unit takes
    starting_depth: float = 6.6  # of a step that would take as long as starting the unit
    fold_cost: float = 8_300.0  # of a fold across the threads of a program beside products
    staying: float = 2.5  # times as many programs seem to run at once where programs stay and take tile after tile
    # --- work that overlaps: of the shorter of two kinds, the part that is not hidden where a processor has one program
    exposed: float = 0.39
    beside_matrix: float = 0.5
    lanes_beside_matrix: float = 0.76  # lanes take turns with the matrix unit
    cache_beside_matrix: float = 0.27  # reads from the shared cache run ahead
    matrix_hides: float = 0.83  # power of the programs that run at once by which they hide each other's work
    # --- the library ---
    call_us: float = 1.2  # of a call, beyond a launch of ours
    library_tiles: tuple[tuple[int, int, float], ...] = ((128, 256, 1.21), (128, 128, 1.25), (64, 64, 1.1))
    library_exposed: float = 0.65  # of the shorter of memory's and the matrix unit's time
    unaligned: float = 3.0  # times as long, where rows of a matrix start at odd addresses
    attention_us: float = 5.0  # until the library's attention has started
    attention_wide: float = 1.0  # part of the rate with heads of 128
    attention_narrow: float = 0.72  # with heads of at most 64
    attention_uneven: float = 4.5  # tiles that the unequal lengths of causal rows cost


# On half of 1,189 kernels, 85 products and 24 calls of attention, bfloat16; see docs/decisions/0011.
H200 = Rates("one H200, 2026-11-18")
UNMEASURED = Rates("data sheet, unmeasured; as an H200 otherwise")
CPU = Rates("rates assumed of any CPU, not measured on this one")
