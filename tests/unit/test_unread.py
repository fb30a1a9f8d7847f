"""Room for answers on their way: within bounds of a connection, a caller and in all, and given back exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ferrum_rpc.core import ANYBODY, Caller
from ferrum_rpc.errors import QueueFull
from ferrum_rpc.service.quotas import Quotas, Unread
from ferrum_rpc.service.records import Resource
from tests.support.serving import LIMITS

MIB = 1 << 20
SMALL = replace(LIMITS, max_unread_bytes=100 * MIB, max_response_bytes=20 * MIB, max_session_response_bytes=20 * MIB)


def test_a_connection_has_half_and_all_connections_have_the_whole() -> None:
    unread, account = Unread(SMALL), Quotas(SMALL).account(ANYBODY)
    held = [unread.allocate("a", account, 20 * MIB) for _ in range(2)]
    with pytest.raises(QueueFull, match="this connection") as caught:
        unread.allocate("a", account, 20 * MIB)
    assert caught.value.retry_after_s is not None
    held += [unread.allocate("b", account, 20 * MIB) for _ in range(2)]
    held.append(unread.allocate("c", account, 20 * MIB))
    with pytest.raises(QueueFull, match=f"{100 * MIB} bytes of answers are"):
        unread.allocate("d", account, 20 * MIB)
    for give in held:
        give()
    assert unread.bytes == 0 and account.held[Resource.UNREAD_BYTES] == 0
    unread.allocate("d", account, 20 * MIB)()


def test_one_of_several_callers_has_its_share_over_all_its_connections() -> None:
    unread, quotas = Unread(SMALL), Quotas(SMALL)
    one, other = (quotas.account(Caller(name, shares=True)) for name in ("one", "other"))
    for peer in ("a", "b"):
        unread.allocate(peer, one, 20 * MIB)
    with pytest.raises(QueueFull, match="answers to you"):
        unread.allocate("c", one, 20 * MIB)
    unread.allocate("c", other, 20 * MIB)


def test_the_largest_answer_always_finds_room_where_nothing_waits() -> None:
    limits = replace(LIMITS, max_unread_bytes=1, max_response_bytes=20 * MIB, max_session_response_bytes=30 * MIB)
    for caller in (ANYBODY, Caller("one", shares=True)):
        unread = Unread(limits)
        give = unread.allocate("a", Quotas(limits).account(caller), 30 * MIB)
        with pytest.raises(QueueFull):
            unread.allocate("b", Quotas(limits).account(caller), MIB)
        give()
        assert unread.bytes == 0
