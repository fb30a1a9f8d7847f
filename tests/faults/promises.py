"""Every promise and the function that tries to break it: for `make soak`, and `test_promises_*` at CI size."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Final

from tests.faults.figures import Promise, number
from tests.faults.models import BITS, STATES, in_4_bits, recurrent, tried_with


def of(files: str) -> tuple[Promise, ...]:
    """The promises of these files of this folder, or of ``file.function``."""
    found: list[Promise] = []
    for each in files.split():
        file, _, function = each.partition(".")
        names = vars(import_module(f"tests.faults.{file}"))
        found += [names[name] for name in names if re.fullmatch(function or r"r\d+_\w+", name)]
    return tuple(found)


def again(files: str) -> tuple[Promise, ...]:
    """The promises `of` these, with recurrent states."""
    return tuple(tried_with(STATES, recurrent, each) for each in of(files))


def in_bits(files: str) -> tuple[Promise, ...]:
    """The promises `of` these, with weights in 4 bits."""
    return tuple(tried_with(BITS, in_4_bits, each) for each in of(files))


IN_PROCESS: Final = of("""
    any_bytes background bad_items deadlines error_contract frame_order handles imports leaks.r15_nothing_leaks prefixes
    retries security states
""") + again("background leaks.r15_nothing_leaks prefixes")
"""Servers of the test's process can be held to these."""

OF_PROCESSES: Final = of("""
    crash_points dead_peers drain exactly_once.r2_exactly_once exactly_once.r2_in_sessions
    exactly_once.r2_by_a_scheduler fleet health hung one_port orphans ranks rebuilds restart transfers
""") + again("""
    crash_points exactly_once.r2_exactly_once exactly_once.r2_in_sessions exactly_once.r2_by_a_scheduler rebuilds
    transfers
""")
"""These need a server process to kill, stop and drain."""

UNDER_LOAD: Final = of("""
    abuse adapters contents crowd grammars hostile leaks.r15_grammars_come_and_go neighbours overload unread
""") + again("hostile")
"""About what a server process takes of the machine, and about neighbours."""

OF_FRONTS: Final = of("front_callers fronts")
"""With a front between client and executor."""

OTHERS: Final = (
    of("exactly_once.r2_under_packet_loss weights")
    + again("crowd neighbours")
    + in_bits("crash_points leaks.r15_nothing_leaks")
)
"""The first needs root, `weights` runs tests of other folders with more rounds, and the others are tried at full size
alone: crowds are the same for every model, and bookkeeping knows nothing of weights."""


PROMISES: Final = tuple(
    sorted((*IN_PROCESS, *OF_PROCESSES, *UNDER_LOAD, *OF_FRONTS, *OTHERS), key=lambda each: int(number(each)[1:]))
)
"""All, in the order of their numbers."""
