"""Rank 0's side of the others: what it tells them, what they answer, and whether they live.

Steps are told without an answer: what ranks exchange in the middle of a step shows that all of them are there. A rank
that fails gives the groups up, so that no other waits for it, and rank 0 has all of them begin anew (`recover`). A rank
that ends, or is silent, is not replaced: everything that waits ends with `DeviceLost`, and the executor with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import structlog

from ferrum_rpc.core import RankState
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.engine.ranks.messages import ABORT, BEAT_S, END, END_S, SILENT_S, Channel
from ferrum_rpc.engine.ranks.setup import Groups
from ferrum_rpc.engine.ranks.waiting import in_a_thread
from ferrum_rpc.errors import DeviceLost, ExecutorError

log = structlog.get_logger("ferrum_rpc.ranks")

LOOK_EVERY_S: Final = 0.25

Result = TypeVar("Result")


ALIVE: Final = RankState(alive=True, resident_bytes=0)


@dataclass(slots=True, eq=False)
class RemoteRank:
    """Another rank, a process ``pid`` of ``host``. ``machine``: the same for all that may share memory; ``address``:
    where others find it, if it is elsewhere. ``heard``: when something came from it last, on `time.monotonic`.
    ``state``: alive until it is lost, with the memory that it reported last."""

    number: int
    line: Channel
    host: str
    pid: int = 0
    machine: str = ""
    address: str = ""
    heard: float = field(default_factory=time.monotonic)
    state: RankState = ALIVE

    def __str__(self) -> str:
        return f"rank {self.number} on {self.host}"


class Ranks:
    """All ranks but this one, in their order. ``on_close`` ends what was started for them, after so many seconds by
    force."""

    def __init__(
        self, members: Sequence[RemoteRank], on_close: Callable[[float], object] = lambda seconds: None
    ) -> None:
        self.groups: Groups | None = None
        self._members, self._on_close = list(members), on_close
        self._changed = threading.Condition()
        self._answers: dict[int, Any] = {}
        self._serial = 0
        self._epoch = 0
        self._failure = ""
        self._lost: DeviceLost | None = None
        self._judged = False
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
        """Of the others, for people."""
        return list(map(str, self._members))

    # --- what is told -----------------------------------------------------------------------------------------------

    def tell(self, method: str, *arguments: Any, to: Iterable[int] | None = None) -> None:
        """Have the ranks (all, or those with these numbers) do something, in the order of what they are told."""
        for member in self._to(to):
            self._send(member, 0, method, arguments)

    def order(self, method: str, *arguments: Any, to: Iterable[int] | None = None) -> list[int]:
        """As `tell`; `collect` gets what they answer."""
        serials = []
        for member in self._to(to):
            self._serial += 1
            serials.append(self._serial)
            self._send(member, self._serial, method, arguments)
        return serials

    def answered(self, serials: Sequence[int]) -> bool:
        """Whether `collect` would not wait."""
        with self._changed:
            return self._lost is not None or all(each in self._answers for each in serials)

    def collect(self, serials: Sequence[int]) -> list[Any]:
        """What was answered. Raises what a rank raised, or `DeviceLost`."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or all(each in self._answers for each in serials))
            if self._lost is not None:
                raise self._lost
            answers = [self._answers.pop(each) for each in serials]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def ask(self, method: str, *arguments: Any, to: Iterable[int] | None = None) -> list[Any]:
        """`order`, then `collect`."""
        return self.collect(self.order(method, *arguments, to=to))

    def give_up(self) -> None:
        """End what any rank waits for in the middle of a step."""
        assert self.groups is not None  # noqa: S101 - there was a step
        self.groups.abort()
        self.tell(ABORT)

    def recover(self) -> None:
        """A step has failed somewhere: end what ranks wait for, and begin anew. Raises `DeviceLost`."""
        assert self.groups is not None  # noqa: S101 - there was a step
        with self._changed:
            self._epoch += 1
            failure, self._failure = self._failure, ""
        if failure:
            log.error("rank_failed", error=failure, action="nothing: its step was undone on all ranks")
        self.give_up()
        self.ask("halt")
        self.tell("renew", self._epoch)
        try:
            self.groups.renew(self._epoch)
        except GroupAborted as error:
            self.check_alive()
            raise DeviceLost(f"the ranks could not restart: {error}") from error

    def judge(self) -> None:
        """From now on a rank that is silent is lost: before, it loads."""
        now = time.monotonic()
        for member in self._members:
            member.heard = now
        self._judged = True

    def check_alive(self) -> None:
        """Raise `DeviceLost` where a rank is gone."""
        if self._lost is not None:
            raise self._lost

    def unless_lost(self, call: Callable[[], Result]) -> Result:
        """What ``call`` returns, which waits for other ranks by itself. Raises `DeviceLost` as soon as one is gone."""
        done = in_a_thread(call)

        def wake(_: object) -> None:
            with self._changed:
                self._changed.notify_all()

        done.add_done_callback(wake)
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or done.done())
        if not done.done():
            self.check_alive()
        return done.result()

    def close(self, why: str = "") -> None:
        """End all. ``why``: what went wrong, if anything did; the others end with it."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.tell(END, why if self._lost is None else self._lost.message)
        if self.groups is not None:
            self.groups.close()
        self._on_close(0.0 if self._lost is not None else END_S)
        for thread in self._threads:  # the interpreter must not end under them
            thread.join(END_S if self._lost is None else 0.0)
        for member in self._members:
            member.line.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _to(self, numbers: Iterable[int] | None) -> list[RemoteRank]:
        return self._members if numbers is None else [self._members[each - 1] for each in numbers]

    def _send(self, member: RemoteRank, serial: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            member.line.send(serial, method, arguments)
        except OSError as error:
            self._lose(member, f"{error.strerror or error}")

    def _listen(self, member: RemoteRank) -> None:
        try:
            while True:
                kind, *rest = member.line.receive()
                member.heard = time.monotonic()
                if kind == "answer":
                    with self._changed:
                        self._answers[rest[0]] = _named(member, rest[1])
                        self._changed.notify_all()
                elif kind == "failed":
                    self._note_failure(member, *rest)
                elif kind == "beat":
                    member.state = RankState(member.state.alive, *rest)
        except TimeoutError:
            self._lose(member, "it is out of reach")
        except (EOFError, OSError):
            self._lose(member, "its process has ended")

    def _note_failure(self, member: RemoteRank, method: str, error: str, epoch: int) -> None:
        with self._changed:
            if epoch != self._epoch:
                return  # `recover` was faster
            self._failure = self._failure or f"{member}, {method}: {error}"
            if self.groups is not None:
                self.groups.abort()

    def _lose(self, member: RemoteRank, why: str) -> None:
        member.state = member.state._replace(alive=False)
        with self._changed:
            if self._closed.is_set() or self._lost is not None:
                return
            self._lost = DeviceLost(f"{member} is gone: {why}")
            log.error(
                "rank_lost",
                rank=member.number,
                host=member.host,
                reason=why,
                action="look why it ended, and start the executor again with the same command",
            )
            if self.groups is not None:
                self.groups.abort()
            self._changed.notify_all()
        for each in self._members:
            if each is not member:
                self._send(each, 0, ABORT, ())

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(LOOK_EVERY_S):
            now = time.monotonic()
            if now - looked > LOOK_EVERY_S + BEAT_S:  # this process did not run: others may have been stopped with it
                self.judge() if self._judged else None
            looked = now
            for member in self._members if self._judged else ():
                if now - member.heard > SILENT_S:
                    self._lose(member, f"nothing was heard of it for {now - member.heard:.1f} s")


def _named(member: RemoteRank, answer: Any) -> Any:
    """An error says whose it is."""
    if isinstance(answer, ExecutorError):
        answer.message = f"{member}: {answer.message}"
        answer.args = (answer.message,)
    return answer
