"""The client's state of one sequence, and the work items that it builds from it. No IO.

The handle changes only with an answer. A call of unknown outcome leaves an `UnknownOutcome`: the same call then repeats
its request id, so that repeating a line of code is as safe as an explicit resend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ferrum_rpc.client.outcomes import Repeat, UnknownOutcome, new_request_id, settled
from ferrum_rpc.client.pieces import Lost, Pieces
from ferrum_rpc.core import HandleRef, OutputSpec, Run
from ferrum_rpc.errors import TruncateBeyondLength
from ferrum_rpc.executor.v1 import forward_pb2, info_pb2
from ferrum_rpc.wire.output import needs_of, output_to_proto


class SequenceMisuseError(RuntimeError):
    """An invalid use of a sequence: two calls at a time, or a call after its release."""


@dataclass(slots=True, eq=False)
class Item:
    """A work item of a batch call: ``tokens`` to feed to a sequence after rolling it back to ``truncate_to``.

    Made by `Sequence.item`. It has a request id and the handle on which it was built, so sending the *same* item again
    after a failure is safe. ``needs``: capabilities that the executor must have. ``run``: it continues with each token
    that it chooses. ``template``: the bytes of an item with its output. ``create``: the options of a new sequence.

    ``follows``: the item after which it runs, on the handle that that one leaves; without tokens of its own it
    ``feeds_chosen``, the last token that that one ``chose``. ``followed``: another item follows it.
    ``committed``: it was answered. ``goes_on``: it may be in flight for longer than a step. ``parent``: the sequence of
    which it makes its own a child.
    ``unsent``: its call has begun, and may still wait for an executor, a lease or a place in the session. ``waiters``
    is set when that is over.
    ``on_tokens``: called with tokens of its run ahead of the answer.
    """

    state: SequenceState
    number: int
    handle: HandleRef | None
    tokens: list[int]
    output: OutputSpec
    template: bytes
    truncate_to: int | None
    request_id: str
    needs: tuple[info_pb2.Capability, ...] = ()
    run: Run | None = None
    create: forward_pb2.CreateOptions | None = None
    follows: Item | None = None
    feeds_chosen: bool = False
    followed: bool = False
    committed: bool = False
    chose: int | None = None
    goes_on: bool = False
    parent: HandleRef | None = None
    unsent: bool = False
    waiters: asyncio.Event | None = None
    on_tokens: Callable[[int, list[int]], None] | None = None

    def __repr__(self) -> str:
        return f"<Item of {len(self.tokens)} tokens at {self.start}>"

    @property
    def start(self) -> int:
        """The position of its first token in the sequence."""
        if self.truncate_to is not None:
            return self.truncate_to
        handle = self.handle or self.parent
        return 0 if handle is None else handle.seq_len

    @property
    def repeats(self) -> bool:
        """Whether it repeats a call that may be in progress."""
        doubt = self.state.creation if self.handle is None else self.state.doubt
        return doubt is not None and doubt.unknown and doubt.request_id == self.request_id

    @property
    def content(self) -> tuple[object, ...]:
        """A key that is equal for items that feed the same tokens to the same sequence."""
        return ("forward", self.handle, self.tokens, self.output, self.truncate_to, self.run)

    @property
    def proto(self) -> forward_pb2.ForwardItem:
        """Its message, a new one each time."""
        message = forward_pb2.ForwardItem()
        self.write(message)
        return message

    def write(self, message: forward_pb2.ForwardItem) -> None:
        """Fill an empty message: with the same each time, except for the lease of a new sequence."""
        message.MergeFromString(self.template)
        message.item_id = self.number  # field by field: two thirds of a constructor's time
        message.request_id = self.request_id
        if not self.feeds_chosen:
            message.token_ids.extend(self.tokens)
        handle = self.handle if self.parent is None else self.parent
        if handle is not None:
            target = message.handle
            target.id, target.seq_len, target.version = handle
        if self.truncate_to is not None:
            message.truncate_to = self.truncate_to
        if self.needs:
            message.needs.extend(self.needs)
        if self.create is not None and self.create.ByteSize():
            message.create.CopyFrom(self.create)
        if self.run is not None:
            message.run.max_tokens = self.run.max_tokens
            message.run.stop_token_ids.extend(self.run.stop_token_ids)
        if self.follows is not None:
            message.follow.feed_chosen = self.feeds_chosen
            if not message.handle.id:
                message.follow.creation = self.follows.request_id

    def sent(self) -> None:
        """Note that it was sent, or that its call has ended."""
        self.unsent = False
        if self.waiters is not None:
            self.waiters.set()
            self.waiters = None

    async def until_sent(self) -> None:
        """Wait while it is `unsent`."""
        if self.unsent:
            self.waiters = self.waiters or asyncio.Event()
            await self.waiters.wait()

    def leaves(self, max_context: int) -> HandleRef:
        """The handle after it if it runs to its end; without an id if it makes the sequence."""
        length = self.start + max(1, len(self.tokens))
        if self.run is not None:
            length = max(length, min(length + self.run.max_tokens - 1, max_context))
        if self.handle is None:
            return HandleRef(b"", length, 1)
        return HandleRef(self.handle.id, length, self.handle.version + 1)


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class SequenceState:
    """The client's view of one sequence. ``handle`` is None until the executor has answered the first item.
    ``lease_id``: the client's own lease that it was created with. ``output`` is that of the last item, with its
    template and the capabilities that it needs. ``busy``: the call in flight, ``behind`` the second one if two follow
    each other; ``follower``: that item, while in flight. ``early``: the commit of an item whose answer has overtaken
    that of the one it follows.
    ``parent``: the first item makes it a child of that sequence, with the first ``inherited`` of its tokens.
    ``rebuilds``: tokens lost with an executor are fed again. ``lost``: the tokens to feed again before anything else.
    ``seen``: the length that the program has seen, while a stream runs ahead of it, or was left."""

    create: forward_pb2.CreateOptions
    handle: HandleRef | None = None
    tokens: list[int] | None = None
    busy: str = ""
    behind: str = ""
    follower: Item | None = None
    released: bool = False
    last_request_id: str = ""
    lease_id: str = ""
    pieces: Pieces = field(default_factory=Pieces)
    output: OutputSpec | None = None
    output_template: bytes = b""
    output_needs: tuple[info_pb2.Capability, ...] = ()
    doubt: UnknownOutcome | None = None
    creation: UnknownOutcome | None = None
    early: tuple[Item, HandleRef, int, Sequence[int]] | None = None
    fork: UnknownOutcome | None = None
    parent: HandleRef | None = None
    inherited: int = 0
    rebuilds: bool = False
    lost: Lost | None = None
    seen: int | None = None

    @property
    def length(self) -> int:
        """Tokens that are certainly in the cache, or in its parent's."""
        return self.inherited if self.handle is None else self.handle.seq_len

    @property
    def seen_length(self) -> int:
        """L from the program's point of view."""
        if self.seen is not None:
            return self.seen
        return self.length if self.lost is None else len(self.lost.tokens)

    @property
    def unplaced(self) -> bool:
        """Whether no executor has any of it."""
        in_doubt = self.creation is not None and self.creation.unknown
        return self.handle is None and self.parent is None and not in_doubt

    def held_tokens(self) -> list[int]:
        """The tokens in the cache, including those of a stream that the program has not read."""
        tokens = self.tokens if self.lost is None else self.lost.tokens
        if tokens is None:
            raise SequenceMisuseError("this sequence does not keep its tokens: make it with keep_tokens=True")
        return list(tokens)

    def existing_handle(self) -> HandleRef:
        """The handle for an operation. Raises if nothing was fed: a rebuilt sequence may be empty."""
        if self.handle is None:
            raise SequenceMisuseError("nothing was fed to this sequence yet, prefill it first")
        return self.handle

    @property
    def in_doubt(self) -> bool:
        """Whether the outcome of a call is unknown."""
        return any(each is not None and each.unknown for each in (self.doubt, self.creation))

    def claim(self, what: str) -> SequenceState:
        """Begin a call, one at a time: ``with state.claim("decode")``."""
        if self.released:
            raise SequenceMisuseError(f"{what}: this sequence was released")
        if self.busy:
            raise SequenceMisuseError(
                f"{what} while {self.busy} is in flight on the same sequence: await one before the other, or fork"
            )
        self.busy = what
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.busy, self.behind = self.behind, ""

    def claim_item(self, item: Item, what: str) -> None:
        """As `claim`, for an item. A follower may be in flight together with the item that it follows, in either order
        of sending."""
        if self.busy and not self.behind and (item.follows or (self.follower and self.follower.follows is item)):
            self.behind = what
        else:
            self.claim(what)
        if item.follows is not None:
            self.follower = item

    def leave_item(self, item: Item) -> None:
        """Note that its call has ended."""
        self.busy, self.behind = self.behind, ""
        if self.follower is item:
            self.follower = None

    def check_idle(self, what: str) -> None:
        """Raise if a call is in flight on the sequence, which is about to be freed."""
        if self.busy:
            raise SequenceMisuseError(f"{what} while {self.busy} is in flight on the same sequence")

    def restart(self, tokens: list[int]) -> None:
        """Drop the handle and the contents: ``tokens`` are fed again before anything else."""
        lost = self.lost or Lost(tokens, self.length, self.pieces)
        self.lost = Lost(tokens, min(lost.known, len(tokens)), lost.long)
        self.handle = self.parent = None
        self.inherited = 0
        self.doubt = None
        self.early = None
        self.pieces = Pieces()
        if self.tokens is not None:
            self.tokens = []

    def child(self, length: int) -> SequenceState:
        """A child with the first ``length`` tokens, which is created when it is first fed."""
        tokens = None if self.tokens is None else self.tokens[:length]
        pieces = self.pieces.upto(length)
        return SequenceState(
            self.create,
            None,
            tokens,
            lease_id=self.lease_id,
            pieces=pieces,
            parent=self.handle,
            inherited=length,
            rebuilds=self.rebuilds,
        )

    # --- building -----------------------------------------------------------------------------------------------

    def request_id(self, content: tuple[object, ...], fresh: str = "") -> str:
        """The request id of a call of unknown outcome with the same content, or a ``fresh`` one."""
        for doubt in (self.doubt, self.creation, self.fork):
            if doubt is not None and doubt.content == content:
                return doubt.request_id
        return fresh or new_request_id()

    def item(
        self,
        item_id: int,
        tokens: list[int],
        output: OutputSpec,
        truncate_to: int | None = None,
        run: Run | None = None,
    ) -> Item:
        """An item on the handle as it is now."""
        handle, parent = self.handle, None
        if handle is None and self.parent is not None:
            parent, truncate_to = self.parent, self._child_at(truncate_to)
        if self.doubt is None and self.creation is None and self.fork is None:
            request_id = new_request_id()
        else:
            request_id = self.request_id(("forward", handle, tokens, output, truncate_to, run))
        if output is not self.output:
            self._note_output(output)
        template, needs = self.output_template, self.output_needs
        item = Item(self, item_id, handle, tokens, output, template, truncate_to, request_id, needs)
        if parent is not None:
            item.parent, item.create = parent, forward_pb2.CreateOptions(fork=True)
            item.needs = (*needs, info_pb2.CAPABILITY_STEP_FORK)
        elif handle is None:
            item.create = forward_pb2.CreateOptions()
            item.create.CopyFrom(self.create)
        if run is not None:
            _add_run(item, run)
        return item

    def _note_output(self, output: OutputSpec) -> None:
        template = forward_pb2.ForwardItem(output=output_to_proto(output)).SerializeToString()
        self.output, self.output_template, self.output_needs = output, template, needs_of(output)

    def _child_at(self, truncate_to: int | None) -> int | None:
        """The length to which its parent is truncated for it; None: not at all."""
        if truncate_to is not None and truncate_to > self.inherited:
            raise TruncateBeyondLength(
                f"the child begins with {self.inherited} tokens and cannot be cut to {truncate_to}"
            )
        at = self.inherited if truncate_to is None else truncate_to
        return None if self.parent is None or at == self.parent.seq_len else at

    def item_behind(
        self,
        follows: Item,
        item_id: int,
        tokens: list[int],
        output: OutputSpec,
        *,
        run: Run | None,
        max_context: int,
    ) -> Item:
        """An item on the handle after another one. Without ``tokens`` it feeds the one that that item chooses."""
        handle = follows.leaves(max_context)
        if not handle.id and self.handle is not None:
            handle = handle._replace(id=self.handle.id)
        if not handle.id and follows.follows is not None:
            raise SequenceMisuseError("one item can follow another: await the answer of the first before a third")
        if output is not self.output:
            self._note_output(output)
        needs = (*self.output_needs, info_pb2.CAPABILITY_FOLLOW)
        item = Item(self, item_id, handle, tokens, output, self.output_template, None, new_request_id(), needs)
        item.follows, item.feeds_chosen, item.goes_on = follows, not tokens, True
        if run is not None:
            _add_run(item, run)
        follows.followed = True
        return item

    def check(self, item: Item) -> None:
        """Raise if the sequence has changed since the item was built; the last item sent may be sent again."""
        if item.follows is not None and not item.committed:
            return
        if item.handle != self.handle and item.request_id != self.last_request_id:
            raise SequenceMisuseError(
                f"this item was built at length {0 if item.handle is None else item.handle.seq_len} and the sequence "
                f"has moved on to {self.length}: build a new one"
            )

    # --- outcomes -----------------------------------------------------------------------------------------------

    def committed(self, item: Item, handle: HandleRef, exact_span_tokens: int, chosen: Sequence[int] = ()) -> None:
        """Note that the executor ran the item, now or when it was sent before. ``exact_span_tokens``: its limit.
        ``chosen``: the tokens of a run, of which all but the last were fed."""
        if item.follows is not None:
            if not item.follows.committed:
                self.early = item, handle, exact_span_tokens, chosen
                return
            if not item.tokens and item.follows.chose is not None:
                item.tokens = [item.follows.chose]
        item.committed = True
        if chosen:
            item.chose = chosen[-1]
        known = self.handle
        if known is None or (handle.id == known.id and handle.version > known.version):
            self.handle = handle
            self.last_request_id = item.request_id
            start, fed = item.start, item.tokens
            self.pieces.fed(start, len(fed), exact_span_tokens)
            if handle.seq_len < start + len(fed):  # of a draft, what was accepted
                fed = fed[: handle.seq_len - start]
                self.pieces.cut(handle.seq_len)
            if self.tokens is not None:
                self.tokens[start:] = fed
                if chosen:
                    self.tokens += chosen[:-1]
        self.doubt = None
        if self.creation is not None and self.creation.request_id == item.request_id:
            self.creation = None
        if self.early is not None and self.early[0].follows is item:
            early, self.early = self.early, None
            self.committed(*early)

    def failed(self, item: Item, error: BaseException, repeat: Repeat) -> None:
        """Note that the item was refused, or that its outcome is unknown."""
        if item.follows is not None:  # only the same item again can settle it
            if self.doubt is None or not self.doubt.unknown:
                self.doubt = settled(self.doubt, UnknownOutcome(("behind", item.request_id), item.request_id), error)
        elif item.handle is None:
            self.creation = settled(self.creation, UnknownOutcome(item.content, item.request_id, repeat), error)
        else:
            self.doubt = settled(self.doubt, UnknownOutcome(item.content, item.request_id), error)

    def rolled_back(self, handle: HandleRef) -> None:
        """Note that the sequence was rolled back."""
        self.handle = handle
        self.doubt = None
        self.early = None
        self.pieces.cut(handle.seq_len)
        if self.tokens is not None:
            del self.tokens[handle.seq_len :]


def followed_first(items: Collection[Item]) -> list[Item]:
    """The items in other calls that must be sent before a call with ``items``, because one of these follows them.
    Marks ``items`` as unsent. Only calls that began earlier are waited for, so that no two wait for each other."""
    first = [each.follows for each in items if each.follows is not None and each.follows.unsent]
    if first:
        own = set(map(id, items))
        first = [each for each in first if id(each) not in own]
    for each in items:
        each.unsent = True
    return first


def _add_run(item: Item, run: Run) -> None:
    item.run, item.goes_on = run, True
    item.needs = (*item.needs, info_pb2.CAPABILITY_RUN)
