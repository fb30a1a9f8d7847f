"""The facade for programs without asyncio: threads, Ctrl-C, its end, and that it offers what the async client does."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ferrum_rpc import client as async_client
from ferrum_rpc.client import Answer, Greedy, SequenceMisuseError, fleet, sync
from ferrum_rpc.client.background import Background
from ferrum_rpc.client.fleet import sync as fleet_sync
from ferrum_rpc.errors import ExecutorError, InvalidRequest, TransportError
from tests.support.serving import Gate, Served, serve_identity

ROOT = Path(__file__).parents[2]
PROMPT = [3, 1, 4, 1, 5]
NAME = "ferrum_rpc client"


class Server:
    """A server in a thread of its own, whose steps a gate can hold."""

    def __init__(self) -> None:
        self.gate = Gate("forward")
        self._loop = Background()
        self._serving = serve_identity(stage=self.gate)
        self.served: Served = self._loop.run(self._serving.__aenter__())
        self.target = self.served.target

    def close(self) -> None:
        self._loop.run(self.served.check())
        self._loop.run(self._serving.__aexit__(None, None, None))
        self._loop.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(params=[False, True], ids=["unary", "session"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[sync.ExecutorClient]:
    with sync.ExecutorClient(server.target, session=request.param) as client:
        yield client


def loops() -> int:
    """Background threads that live."""
    return sum(each.name == NAME for each in threading.enumerate())


ASYNC_ONLY = {"move_to"}  # it needs two clients in one event loop

# --- what it offers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (sync.ExecutorClient, async_client.ExecutorClient),
        (sync.Sequence, async_client.Sequence),
        (fleet_sync.FleetClient, fleet.FleetClient),
        (fleet_sync.FleetSequence, fleet.FleetSequence),
    ],
)
def test_the_facade_has_every_public_member_with_the_same_arguments(ours: type, theirs: type) -> None:
    own = [each for each in theirs.__mro__ if each.__module__.startswith("ferrum_rpc")]
    public = {name for each in own for name in vars(each) if not name.startswith("_")} - ASYNC_ONLY
    assert len(public) > 8
    for member in public:
        original = inspect.getattr_static(theirs, member)
        facade = inspect.getattr_static(ours, member)
        assert isinstance(facade, property) == isinstance(original, property), member
        if not isinstance(original, property):
            assert inspect.signature(facade).parameters.keys() == inspect.signature(original).parameters.keys(), member
            assert not inspect.iscoroutinefunction(facade), member
        assert inspect.getdoc(facade), member


def test_a_program_without_asyncio_feeds_forks_rolls_back_and_releases(client: sync.ExecutorClient) -> None:
    before = client.status().pressure.sequences
    with client.sequence() as sequence:
        tokens = [sequence.prefill(PROMPT).token]
        tokens.append(sequence.decode(tokens[0]).token)
        [branch] = sequence.fork(at=len(PROMPT))
        assert isinstance(branch, sync.Sequence)
        with branch:
            results = client.forward([sequence.item([tokens[1]], Greedy()), branch.item(tokens[:1])])
            assert [type(each) for each in results] == [Answer, Answer]
            assert branch.length == len(PROMPT) + 1
        assert branch.released
        sequence.truncate(len(PROMPT))
        with sequence.child() as child:
            assert child.decode(tokens[0]).token == tokens[1] and child.length == len(PROMPT) + 1
        assert list(sequence.generate(tokens[:1], max_tokens=1)) == tokens[1:]
        assert repr(sequence) == f"<Sequence length=6 version={sequence.version}>"
        with pytest.raises(InvalidRequest):
            sequence.fork(0)
    assert client.status().pressure.sequences == before


def test_a_stream_left_early_is_closed_and_goes_on(client: sync.ExecutorClient) -> None:
    with client.sequence() as sequence:
        whole = list(sequence.generate(PROMPT, max_tokens=6))
        sequence.truncate(0)
        seen = []
        for token in sequence.generate(PROMPT):
            seen.append(token)
            if len(seen) == 3:
                break
        assert sequence.length == len(PROMPT) + 2
        assert seen + list(sequence.generate(seen[-1:], max_tokens=3)) == whole


# --- threads --------------------------------------------------------------------------------------------------------


def test_several_threads_share_a_client(client: sync.ExecutorClient) -> None:
    def text(_: int) -> list[int]:
        with client.sequence() as sequence:
            return list(sequence.generate(PROMPT, max_tokens=12))

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(text, range(16)))
    assert len(set(map(tuple, texts))) == 1


def test_two_threads_on_one_sequence_are_told_so_and_nothing_is_lost(server: Server) -> None:
    with sync.ExecutorClient(server.target) as client, client.sequence() as sequence, ThreadPoolExecutor(1) as pool:
        sequence.prefill(PROMPT)
        server.gate.close()
        held = pool.submit(sequence.decode, 1)
        assert server.gate.reached.wait(20)
        with pytest.raises(SequenceMisuseError):
            sequence.decode(2)
        server.gate.open()
        assert held.result().length == len(PROMPT) + 1


async def test_a_program_with_a_running_loop_may_use_it(server: Server) -> None:
    assert asyncio.get_running_loop().is_running()
    with sync.ExecutorClient(server.target) as client, client.sequence() as sequence:
        assert sequence.prefill(PROMPT).length == len(PROMPT)


def test_a_callback_that_would_wait_for_its_own_loop_is_told_so(client: sync.ExecutorClient) -> None:
    async def callback() -> Any:
        return client.status()

    with pytest.raises(RuntimeError, match="cannot wait for that loop"):
        client._background.run(callback())


# --- its end --------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_call_that_waits_and_the_same_call_settles_it(server: Server) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    with sync.ExecutorClient(server.target) as client, client.sequence() as sequence:
        sequence.prefill(PROMPT)
        server.gate.close()
        main = threading.get_ident()

        def interrupt() -> None:
            assert server.gate.reached.wait(20)
            signal.pthread_kill(main, signal.SIGINT)

        helper = threading.Thread(target=interrupt)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            sequence.decode(9)
        helper.join()
        server.gate.open()
        assert sequence.in_doubt
        assert sequence.decode(9).length == len(PROMPT) + 1
        assert not sequence.in_doubt


def test_leaving_it_releases_the_sequences_and_ends_the_thread(server: Server) -> None:
    before = loops()
    with sync.ExecutorClient(server.target) as client:
        assert loops() == before + 1
        kept = client.sequence()
        kept.prefill(PROMPT)
    assert loops() == before and not server.served.server.state.handles.live
    with pytest.raises(RuntimeError, match="not open"):
        client.status()
    with pytest.raises(RuntimeError, match="closed"):
        kept.decode(1)
    client.close()
    with client:  # it may be opened again, as the async one may
        assert client.sequence().prefill(PROMPT).length == len(PROMPT)
    assert loops() == before


def test_closing_it_ends_the_calls_of_other_threads(server: Server) -> None:
    client = sync.ExecutorClient(server.target, release_timeout_s=0.2).__enter__()
    sequence = client.sequence()
    sequence.prefill(PROMPT)
    server.gate.close()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(sequence.decode, 1)
        assert server.gate.reached.wait(20)
        client.close()
        assert isinstance(held.exception(20), ExecutorError)
        server.gate.open()


def test_a_client_that_is_forgotten_takes_its_thread_with_it(server: Server) -> None:
    before = loops()
    client: Any = sync.ExecutorClient(server.target).__enter__()
    client.info()
    assert loops() == before + 1
    del client
    gc.collect()
    assert loops() == before


FORGETFUL = """
import sys
from ferrum_rpc.client.sync import ExecutorClient
clients = [ExecutorClient(sys.argv[1], session=each).__enter__() for each in (False, True)]
sequences = [each.sequence() for each in clients]
print(*(each.prefill([1, 2, 3]).length for each in sequences))
"""


def test_a_program_that_never_closes_it_releases_its_sequences_at_its_end(server: Server) -> None:
    command = [sys.executable, "-c", FORGETFUL, server.target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "3 3", "")
    assert not list(server.served.server.state.handles.records())


def test_a_client_that_nobody_answers_leaves_no_thread() -> None:
    before = loops()
    with socket.socket() as taken:  # bound and not listening: refused, and nobody else's
        taken.bind(("127.0.0.1", 0))
        client = sync.ExecutorClient(f"127.0.0.1:{taken.getsockname()[1]}")
        with client, pytest.raises(TransportError):
            client.status()
    assert loops() == before
