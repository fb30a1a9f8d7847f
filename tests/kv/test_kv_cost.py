"""A decode costs the same at every length and with every number of live sequences.

Wall time on a shared machine is noisy: the two sides alternate, the fastest of many short rounds counts, and the bound
is generous against the factor of 100 and more that a linear cost would show.
"""

from __future__ import annotations

import time

import numpy as np

from ferrum_rpc.kv.manager import KvManager

SEQUENCE, SHORT, LONG = 0, 100, 32_000


def cache(length: int, others: int = 0) -> KvManager:
    kv = KvManager(LONG // 16 + 100 + others, 16)
    for other in range(1, others + 1):
        kv.commit(kv.reserve(other, 0, 10, create=True), np.zeros(10, np.int32))
    kv.commit(kv.reserve(SEQUENCE, 0, length, create=True), np.zeros(length, np.int32))
    return kv


def decode(kv: KvManager, steps: int = 64) -> float:
    """Seconds for ``steps`` single tokens; the sequence is as long as before afterwards."""
    length = kv.length(SEQUENCE)
    began = time.perf_counter()
    for step in range(steps):
        kv.commit(kv.reserve(SEQUENCE, length + step, 1), np.zeros(1, np.int32))
    took = time.perf_counter() - began
    kv.truncate(SEQUENCE, length)
    return took


def ratio(small: KvManager, large: KvManager) -> float:
    rounds = [(decode(small), decode(large)) for _ in range(60)]
    return min(b for _, b in rounds) / min(a for a, _ in rounds)


def test_a_decode_costs_the_same_at_every_length():
    assert ratio(cache(SHORT), cache(LONG)) < 3


def test_a_decode_costs_the_same_with_every_number_of_live_sequences():
    assert ratio(cache(SHORT), cache(SHORT, others=10_000)) < 3
