"""Promises that a server in this process can be held to, at the size of CI. `make soak` tries harder."""

from __future__ import annotations

from tests.faults.any_bytes import r14_any_bytes_get_a_canonical_answer
from tests.faults.bad_items import r20_a_bad_item_harms_nobody
from tests.faults.deadlines import r6_deadlines_and_cancels_are_honoured
from tests.faults.error_contract import r17_the_error_contract_is_true
from tests.faults.frame_order import r21_frames_keep_their_order
from tests.faults.handles import r1_handles_cannot_be_forged
from tests.faults.leaks import r15_nothing_leaks
from tests.faults.prefixes import r27_a_prefix_is_shared_by_those_who_may
from tests.faults.retries import r7_retries_are_safe
from tests.faults.sizes import CI


async def test_r1_handles_cannot_be_forged_or_confused() -> None:
    (await r1_handles_cannot_be_forged(CI)).check()


async def test_r6_deadlines_and_cancels_are_honoured() -> None:
    (await r6_deadlines_and_cancels_are_honoured(CI)).check()


async def test_r7_retries_are_safe_by_default() -> None:
    (await r7_retries_are_safe(CI)).check()


async def test_r14_any_bytes_get_a_canonical_answer() -> None:
    (await r14_any_bytes_get_a_canonical_answer(CI)).check()


async def test_r15_nothing_leaks() -> None:
    (await r15_nothing_leaks(CI)).check()


async def test_r17_the_error_contract_is_true() -> None:
    (await r17_the_error_contract_is_true(CI)).check()


async def test_r20_a_bad_item_harms_nobody() -> None:
    (await r20_a_bad_item_harms_nobody(CI)).check()


async def test_r21_frames_keep_their_order() -> None:
    (await r21_frames_keep_their_order(CI)).check()


async def test_r27_a_prefix_is_shared_only_by_those_who_may() -> None:
    (await r27_a_prefix_is_shared_by_those_who_may(CI)).check()
