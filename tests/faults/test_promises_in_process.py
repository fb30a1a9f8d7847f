"""Promises that a server in this process can be held to, at the size of CI. `make soak` tries harder."""

from __future__ import annotations

from tests.faults.any_bytes import r14_any_bytes_get_a_canonical_answer
from tests.faults.bad_items import r20_a_bad_item_harms_nobody
from tests.faults.deadlines import r6_deadlines_and_cancels_are_honoured
from tests.faults.error_contract import r17_the_error_contract_is_true
from tests.faults.figures import hold
from tests.faults.frame_order import r21_frames_keep_their_order
from tests.faults.handles import r1_handles_cannot_be_forged
from tests.faults.imports import r32_an_import_harms_nobody_else
from tests.faults.leaks import r15_nothing_leaks
from tests.faults.prefixes import r27_a_prefix_is_shared_by_those_who_may
from tests.faults.retries import r7_retries_are_safe


async def test_r1_handles_cannot_be_forged_or_confused() -> None:
    await hold(r1_handles_cannot_be_forged)


async def test_r6_deadlines_and_cancels_are_honoured() -> None:
    await hold(r6_deadlines_and_cancels_are_honoured)


async def test_r7_retries_are_safe_by_default() -> None:
    await hold(r7_retries_are_safe)


async def test_r14_any_bytes_get_a_canonical_answer() -> None:
    await hold(r14_any_bytes_get_a_canonical_answer)


async def test_r15_nothing_leaks() -> None:
    await hold(r15_nothing_leaks)


async def test_r17_the_error_contract_is_true() -> None:
    await hold(r17_the_error_contract_is_true)


async def test_r20_a_bad_item_harms_nobody() -> None:
    await hold(r20_a_bad_item_harms_nobody)


async def test_r21_frames_keep_their_order() -> None:
    await hold(r21_frames_keep_their_order)


async def test_r27_a_prefix_is_shared_only_by_those_who_may() -> None:
    await hold(r27_a_prefix_is_shared_by_those_who_may)


async def test_r32_an_import_harms_nobody_else() -> None:
    await hold(r32_an_import_harms_nobody_else)
