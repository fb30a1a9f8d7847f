"""Rank 0's side of the connections to other ranks: requests, answers and liveness.

Steps are sent without an answer: the collectives within a step show that all ranks are there. A rank that fails aborts
the groups, so that no other rank waits for it, and rank 0 restarts all of them (`recover`). A rank that ends, or is
silent, is not replaced: everything that waits fails with `DeviceLost`, and the executor ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import structlog

from ferrum_rpc.core import RankState
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.engine.channel import Channel, dump
from ferrum_rpc.engine.ranks.messages import ABORT, END, END_S, HEARTBEAT_S, SILENT_S
from ferrum_rpc.engine.ranks.setup import Groups
from ferrum_rpc.errors import DeviceLost, ExecutorError

log = structlog.get_logger("ferrum_rpc.ranks")

LOOK_EVERY_S: Final = 0.25

Result = TypeVar("Result")

Answer = Future[Any]

ALIVE: Final = RankState(alive=True, resident_bytes=0)


@dataclass(slots=True, eq=False)
class RemoteRank:
    """Another rank, a process ``pid`` of ``host``. ``machine``: equal for all that can share memory; ``address``: its
    address for other machines. ``heard``: the time of its last message, on `time.monotonic`. ``state``: alive until it
    is lost, with the memory that it reported last."""

    number: int
    channel: Channel
    host: str
    pid: int = 0
    machine: str = ""
    address: str = ""
    heard: float = field(default_factory=time.monotonic)
    state: RankState = ALIVE

    def __str__(self) -> str:
        return f"rank {self.number} on {self.host}"


class Ranks:
    """All ranks but this one, in rank order. ``on_close`` ends the processes started for them, after so many seconds by
    force."""

    def __init__(
        self, members: Sequence[RemoteRank], on_close: Callable[[float], object] = lambda seconds: None
    ) -> None:
        self.groups: Groups | None = None
        self._members, self._on_close = list(members), on_close
        self._lock = threading.Lock()
        self._answers: dict[tuple[int, int], Answer] = {}  # the awaited answers, by serial and rank
        self._lost: DeviceLost | None = None
        self._one_lost: Answer = Future()
        self._serial = 0
        self._epoch = 0
        self._failure = ""
        self._checked = False
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._listen, args=(each,), daemon=True) for each in self._members]
        self._threads.append(threading.Thread(target=self._watch, daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def processes(self) -> list[int]:
        """Of the others."""
        return [member.pid for member in self._members]

    def states(self) -> list[RankState]:
        """Of the others."""
        return [member.state for member in self._members]

    @property
    def names(self) -> list[str]:
        """Display names of the other ranks."""
        return list(map(str, self._members))

    # --- what they do -----------------------------------------------------------------------------------------------

    def send(self, method: str, *arguments: Any, to: Sequence[int] | None = None) -> None:
        """Send a request to the ranks (all, or those with these numbers), which carry requests out in order."""
        self._send(self._to(to), dump((0, (), method, arguments)))

    def order(
        self, method: str, *arguments: Any, to: Sequence[int] | None = None, answering: Sequence[int] | None = None
    ) -> list[Answer]:
        """As `send`; `collect` returns the answers of these ranks, or of those ``answering``. Raises `DeviceLost`."""
        members = self._to(to)
        if answering is None:
            answering = [each.number for each in members]
        self._serial += 1
        answers: dict[tuple[int, int], Answer] = {(self._serial, each): Future() for each in answering}
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._answers |= answers
        self._send(members, dump((self._serial, answering, method, arguments)))
        return list(answers.values())

    def collect(self, answers: Sequence[Answer]) -> list[Any]:
        """The answers. Raises a rank's error, or `DeviceLost`."""
        found: list[Any] = []
        failed: BaseException | None = None
        for each in answers:  # wait for all before one raises
            try:
                found.append(each.result())
            except BaseException as error:
                failed = failed or error
        self.check_alive()
        if failed is not None:
            raise failed
        return found

    def ask(self, method: str, *arguments: Any, to: Sequence[int] | None = None) -> list[Any]:
        """`order`, then `collect`."""
        return self.collect(self.order(method, *arguments, to=to))

    def abort(self) -> None:
        """Abort the collectives of a step on all ranks."""
        assert self.groups is not None  # noqa: S101 - there was a step
        self.groups.abort()
        self.send(ABORT)

    def recover(self, masks: Sequence[tuple[bytes, bytes]]) -> None:
        """Restart the ranks after a failed step: abort their collectives, and renew them with these ``masks`` (ids and
        words). Raises `DeviceLost`."""
        assert self.groups is not None  # noqa: S101 - there was a step
        with self._lock:
            self._epoch += 1
            failure, self._failure = self._failure, ""
        if failure:
            log.error("rank_failed", error=failure, action="nothing: its step was undone on all ranks")
        self.abort()
        self.ask("halt")
        renewed = self.order("renew", self._epoch, masks)
        try:
            self.groups.renew(self._epoch)
        except GroupAborted as error:
            self.check_alive()
            raise DeviceLost(f"the ranks could not restart: {error}") from error
        self.collect(renewed)

    def start_liveness_checks(self) -> None:
        """Treat silent ranks as lost from now on; before, they load."""
        now = time.monotonic()
        for member in self._members:
            member.heard = now
        self._checked = True

    def check_alive(self) -> None:
        """Raise `DeviceLost` if a rank is gone."""
        if self._lost is not None:
            raise self._lost

    def unless_lost(self, call: Callable[[], Result]) -> Result:
        """Run ``call``, which waits for other ranks. Raises `DeviceLost` as soon as one is gone."""
        done = in_a_thread(call)
        wait((done, self._one_lost), return_when=FIRST_COMPLETED)
        if not done.done():
            self.check_alive()
        return done.result()

    def close(self, why: str = "") -> None:
        """End all ranks. ``why``: the error with which they end, if any."""
        if self._closed.is_set():
            return
        self._closed.set()
        lost = self._lost
        self.send(END, why if lost is None else lost.message)
        if self.groups is not None:
            self.groups.close()
        self._on_close(END_S if lost is None else 0.0)
        for thread in self._threads:  # the interpreter must not end under them
            thread.join(END_S if lost is None else 0.0)
        for member in self._members:
            member.channel.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _to(self, numbers: Iterable[int] | None) -> list[RemoteRank]:
        return self._members if numbers is None else [self._members[each - 1] for each in numbers]

    def _send(self, members: Iterable[RemoteRank], message: bytes) -> None:
        for member in members:
            try:
                member.channel.send_dumped(message)
            except OSError as error:
                self._lose(member, f"{error.strerror or error}")

    def _listen(self, member: RemoteRank) -> None:
        try:
            while True:
                kind, *rest = member.channel.receive()
                member.heard = time.monotonic()
                if kind == "answer":
                    self._take_answer(member, *rest)
                elif kind == "failed":
                    self._note_failure(member, *rest)
                elif kind == "heartbeat":
                    member.state = RankState(member.state.alive, *rest)
        except TimeoutError:
            self._lose(member, "it is out of reach")
        except (EOFError, OSError):
            self._lose(member, "its process has ended")

    def _take_answer(self, member: RemoteRank, serial: int, answer: Any) -> None:
        with self._lock:
            waiting = self._answers.pop((serial, member.number), None)
        if waiting is None:  # another rank was lost
            return
        if isinstance(answer, ExecutorError):  # name the rank
            answer.message = f"{member}: {answer.message}"
            answer.args = (answer.message,)
        if isinstance(answer, BaseException):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _note_failure(self, member: RemoteRank, method: str, error: str, epoch: int) -> None:
        with self._lock:
            if epoch != self._epoch:
                return  # `recover` was faster
            self._failure = self._failure or f"{member}, {method}: {error}"
            if self.groups is not None:
                self.groups.abort()

    def _lose(self, member: RemoteRank, why: str) -> None:
        member.state = member.state._replace(alive=False)
        with self._lock:
            if self._closed.is_set() or self._lost is not None:
                return
            self._lost = lost = DeviceLost(f"{member} is gone: {why}")
            answers = [self._one_lost, *self._answers.values()]
            self._answers.clear()
        log.error(
            "rank_lost",
            rank=member.number,
            host=member.host,
            reason=why,
            action="see why it ended, and start the executor again with the same command",
        )
        if self.groups is not None:
            self.groups.abort()
        member.channel.shut_down()  # the model thread may be sending what a stopped process does not read
        for each in answers:
            each.set_exception(lost)
        self._send([each for each in self._members if each is not member], dump((0, (), ABORT, ())))

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(LOOK_EVERY_S):
            now = time.monotonic()
            if now - looked > LOOK_EVERY_S + HEARTBEAT_S:  # this process did not run, so others may not have run either
                self.start_liveness_checks() if self._checked else None
            looked = now
            for member in self._members if self._checked else ():
                if now - member.heard > SILENT_S:
                    self._lose(member, f"nothing was heard of it for {now - member.heard:.1f} s")


def in_a_thread(call: Callable[[], Result]) -> Future[Result]:
    """Run ``call`` in a daemon thread. It may wait inside a library, where neither a signal nor the loss of a rank ends
    the wait: a caller that stops waiting abandons the thread."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ferrum-ranks-wait", daemon=True).start()
    return future
