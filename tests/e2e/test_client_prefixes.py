"""A router's view of a prefix cache: right through lost connections and restarts, and on what it says hits can rely."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from ferrum_rpc.client import ExecutorClient, PrefixIndex
from ferrum_rpc.errors import DeadlineExceeded, NotSupported, TransportError
from tests.support.clients import restarting
from tests.support.serving import serve_identity

PROMPT = list(range(30))


async def test_an_index_goes_on_after_a_lost_connection_and_begins_anew_after_a_restart() -> None:
    async with (
        restarting(session=False) as (first, second, proxy, router),
        ExecutorClient(first.target) as client,
        ExecutorClient(second.target) as other,
        client.sequence() as one,
        client.sequence(cache_salt=b"s") as salted,
        other.sequence() as another,
    ):
        index = PrefixIndex.of(await router.info())
        async with aclosing(router.watch_prefixes()) as watch:
            begun = await anext(watch)
            assert (begun.anew, begun.changes, begun.gap) == (True, (), False)
            assert (await one.prefill(PROMPT)).cached_tokens == 0
            index.apply(events := await anext(watch))
            assert not events.anew
            assert [index.match(PROMPT), index.match(PROMPT[:9]), index.match([*PROMPT[:9], 0])] == [28, 8, 8]
            for tokens in (PROMPT, [*PROMPT[:9], 0]):
                async with client.sequence() as hit:
                    assert (await hit.prefill(tokens)).cached_tokens == index.match(tokens)
            assert index.match(PROMPT, salt=b"s") == 0

            proxy.reset_all()
            await salted.prefill(PROMPT)
            while not index.match(PROMPT, salt=b"s"):
                index.apply(events := await anext(watch))
                assert not events.anew, "it goes on where it was"

            await another.prefill([5] * 9)
            proxy.lead_to(second.target)
            while not events.anew:
                index.apply(events := await anext(watch))
            assert not events.gap
            assert (index.match(PROMPT), index.match([5] * 9), len(index)) == (0, 8, 2)
        assert second.server.state.watchers <= 1


async def test_a_watch_ends_where_nobody_answers_or_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ExecutorClient("127.0.0.1:1") as client:
        with pytest.raises((TransportError, DeadlineExceeded)):
            await anext(client.watch_prefixes(patience_s=0.2))
    monkeypatch.setattr("ferrum_rpc.service.state.CAPABILITIES", ())
    async with serve_identity() as served, ExecutorClient(served.target) as client:
        with pytest.raises(NotSupported, match="KV_EVENTS"):
            await anext(client.watch_prefixes())
