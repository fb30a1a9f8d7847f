"""Any history of calls: a live server answers what a plain-Python oracle says, and its books agree after every step.

Hypothesis drives the real thing over a real port: grpc.aio, the model thread, the paged cache and the identity model.
The pool is a few blocks, so that exhaustion, sharing and copy-on-write are everyday matters; a step is made to fail now
and then. After every rule the test looks at both floors: lengths, versions, free blocks and counters are the oracle's,
`check()` passes, the cache holds the embedding of every token of every sequence, and every slot that nobody owns is
filled with NaN before the next call.

`FERRUM_FUZZ_ROUNDS` (default 1) multiplies the number of histories.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc
import numpy as np
import structlog
import torch
from hypothesis import HealthCheck, Phase, note, reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import executor_control_pb2 as control
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, types_pb2
from ferrum_rpc.executor.v1 import model_executor_pb2 as messages
from ferrum_rpc.service.replay import record_bytes
from tests.service.model import (
    EXHAUSTED,
    INVALID,
    TOO_MANY,
    Committed,
    Handle,
    Item,
    Limits,
    Oracle,
    Outcome,
    Output,
    Record,
    Refused,
    Replayed,
    Sequence,
    check_row,
    logits_after,
)
from tests.support.identity_oracle import _embeddings
from tests.support.inside import recorded, sequences, table_of
from tests.support.poison import poison
from tests.support.serving import Served, serve_identity
from tests.support.transfers import brought, chunks_of, exported, header, imported
from tests.support.wiring import error_of, error_of_call

ROUNDS = float(os.environ.get("FERRUM_FUZZ_ROUNDS", "1"))
PATIENCE_S = 10.0
SHAPES = {
    "Prefill": "prefill",
    "BatchPrefill": "prefill",
    "Decode": "decode",
    "BatchDecode": "decode",
    "UnifiedForward": "any",
    "ForwardVerify": "verify",
}
BATCHES = {"BatchPrefill", "BatchDecode", "UnifiedForward"}
POSITIONS = {
    "unset": output_pb2.POSITIONS_UNSPECIFIED,
    "last": output_pb2.POSITIONS_LAST,
    "all": output_pb2.POSITIONS_ALL,
    "none": output_pb2.POSITIONS_NONE,
}
DTYPES = {
    "unset": types_pb2.D_TYPE_UNSPECIFIED,
    "f32": types_pb2.D_TYPE_F32,
    "bf16": types_pb2.D_TYPE_BF16,
    "f16": types_pb2.D_TYPE_F16,
}
MOMENTS = [None, None, 0, 10, 50, 100, 150, 200, 250, 300, 350, 400, 500, 700, 1000]
"""Turns of the loop until a call is cancelled; an answer takes some hundreds."""
NUMPY = {
    types_pb2.D_TYPE_F32: np.float32,
    types_pb2.D_TYPE_F16: np.float16,
    types_pb2.D_TYPE_BF16: np.uint16,
    types_pb2.D_TYPE_U32: np.uint32,
}
MODELS: list[dict[str, Any]] = [
    {"positional": True},
    {"positional": True, "vocab_size": 24, "heads": 4, "kv_heads": 2},
    {"positional": True, "vocab_size": 48, "heads": 4, "kv_heads": 2},
    {"vocab_size": 40, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 4},
]
"""As specified; one whose channels fold over its vocabulary, with grouped heads; one in which every logit occurs twice;
one that often has only ties of zeros at the top."""


# --- the wire -------------------------------------------------------------------------------------------------------


def handle_message(handle: Handle) -> types_pb2.KvHandle:
    return types_pb2.KvHandle(id=handle.id, seq_len=handle.seq_len, version=handle.version)


def handle_of(message: types_pb2.KvHandle) -> Handle:
    return Handle(message.id, message.seq_len, message.version)


def output_message(output: Output) -> output_pb2.OutputSpec | None:
    if output == Output():
        return None
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"greedy": output_pb2.GreedyOutput()},
        "logprob": {"greedy": output_pb2.GreedyOutput(logprob=True)},
        "top": {"top_tokens": output_pb2.TopTokensOutput(k=output.k)},
        "selected": {"selected_tokens": output_pb2.SelectedTokensOutput(token_ids=output.ids)},
        "full": {"full_logits": output_pb2.FullLogitsOutput(dtype=DTYPES[output.dtype])},
    }
    return output_pb2.OutputSpec(positions=POSITIONS[output.positions], **kinds.get(output.kind, {}))


SALTS: Final = itertools.count()


def item_message(item: Item, item_id: int) -> forward_pb2.ForwardItem:
    return forward_pb2.ForwardItem(
        item_id=item_id,
        handle=None if item.handle is None else handle_message(item.handle),
        token_ids=item.tokens,
        truncate_to=item.truncate_to,
        output=output_message(item.output),
        request_id=item.request_id,
        create=None if item.handle is not None and item.reserve is None else options_message(item),
    )


def options_message(item: Item) -> forward_pb2.CreateOptions:
    """The oracle knows no blocks that are shared because their tokens are alike: nobody has the salt of another."""
    if item.request_id:
        return forward_pb2.CreateOptions(reserve_tokens=item.reserve or 0, cache_mode=forward_pb2.CACHE_MODE_BYPASS)
    return forward_pb2.CreateOptions(reserve_tokens=item.reserve or 0, cache_salt=b"%d" % next(SALTS))


def array_of(tensor: types_pb2.Tensor) -> np.ndarray:
    """float32 for all floats."""
    array = np.frombuffer(tensor.data, NUMPY[tensor.dtype]).reshape(tuple(tensor.shape))
    if tensor.dtype == types_pb2.D_TYPE_BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if tensor.dtype == types_pb2.D_TYPE_F16 else array


class RowReader:
    """The rows of one answer. `done` says whether every row belonged to exactly one item."""

    def __init__(self, blocks: Any):
        self.blocks = blocks
        self.taken: list[set[int]] = [set() for _ in blocks]

    def take(self, where: output_pb2.RowRange, output: Output, replayed: bool = False) -> dict[str, np.ndarray]:
        """The item's rows by name. Only items that replay an answer may share its rows."""
        block = self.blocks[where.block]
        rows = range(where.first, where.first + where.count)
        assert replayed or self.taken[where.block].isdisjoint(rows)
        self.taken[where.block].update(rows)
        wanted = {"top": "top_tokens", "selected": "selected_tokens", "full": "logits"}.get(output.kind, "tokens")
        assert block.WhichOneof("kind") == wanted
        kind = getattr(block, wanted)
        if output.kind == "full":
            assert kind.logits.dtype == DTYPES["f32" if output.dtype == "unset" else output.dtype]
        arrays = {field.name: array_of(tensor) for field, tensor in kind.ListFields()}
        return {name: array[where.first : where.first + where.count] for name, array in arrays.items()}

    def done(self) -> None:
        for block, taken in zip(self.blocks, self.taken, strict=True):
            kind = getattr(block, block.WhichOneof("kind"))
            for _, tensor in kind.ListFields():
                assert taken == set(range(tensor.shape[0])), "a row that belongs to no item of this answer"


CAUSE = "made to fail by the test"


class Failing:
    """A stage hook that raises once where it was told to."""

    def __init__(self) -> None:
        self.at: str | None = None

    def __call__(self, stage: str) -> None:
        if stage == self.at:
            self.at = None
            raise RuntimeError(CAUSE)


# --- the machine ----------------------------------------------------------------------------------------------------


def some_live(machine: ExecutorMachine) -> bool:
    return bool(machine.oracle.live)


class ExecutorMachine(RuleBasedStateMachine):
    """Rules send calls; `judge` compares an answer with the oracle's; the invariant looks at the server's state."""

    # --- life -------------------------------------------------------------------------------------------------------

    @initialize(
        model=st.sampled_from(MODELS),
        blocks=st.sampled_from([24, 24, 9]),
        size=st.sampled_from([4, 4, 3, 1]),
        replay_bytes=st.sampled_from([1 << 20, 4000]),
        seed=st.integers(0, 2**16),
    )
    def start(self, model, blocks, size, replay_bytes, seed):
        self.limits = Limits(
            vocab=model.get("vocab_size", 256),
            max_context=60,
            max_batch_items=6,
            max_batch_tokens=48,
            max_top_tokens=20,
            max_selected_tokens=6,
            max_response_bytes=6_000,
            max_sequences=12,
            replay_bytes=replay_bytes,
        )
        self.oracle = Oracle(self.limits, blocks, size)
        self.failing = Failing()
        self.random = random.Random(seed)
        self.calls = 0
        self.attempts: list[int | None] = []
        """Besides each call that is sent: how many turns of the loop until it is cancelled; None: it is not."""
        self.request_ids: Counter[bytes | None] = Counter()
        self.steps = 0
        self.sent: list[tuple[str, Item]] = []
        """Forward items with a request id that were committed, and the shape they were sent in."""
        self.followed: defaultdict[Any, set[int]] = defaultdict(set)
        """By a family and a beginning of some tokens of it: the tokens that have followed there."""
        self.operations: list[tuple[str, Any]] = []
        """Operations with a request id that were done."""
        self.loop = asyncio.new_event_loop()
        self.life = AsyncExitStack()
        told = {name: value for name, value in vars(self.limits).items() if name != "vocab"}
        told["max_transfers"] = 1  # of several sequences that come back, the first item's takes its blocks first
        self.folder = Path(self.life.enter_context(TemporaryDirectory()))
        about = {"park_dir": self.folder, "stage": self.failing}
        server = serve_identity(kv_blocks=blocks, block_size=size, **about, **told, **model)
        self.served: Served = self.run(self.life.enter_async_context(server))
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))  # steps fail on purpose here
        self.config = self.served.runner.model.config
        self.broken = False

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    def teardown(self):
        if not hasattr(self, "served"):
            return
        try:
            if not self.broken:
                self.everything_is_given_back()
        finally:
            self.run(self.life.aclose())
            self.loop.close()

    def everything_is_given_back(self):
        self.broken = True
        for sequence in list(self.oracle.live.values()):
            answer = self.send(self.served.release, handle_message(sequence.handle))
            assert not isinstance(answer, ExecutorError), answer
            self.oracle.remove(sequence)
        self.the_books_agree()
        status = self.send(self.served.status)
        assert status.pressure.free_blocks == status.pressure.total_blocks
        assert status.counters.sequences_created == status.counters.sequences_released
        assert not status.blocks.parked_bytes

    # --- calls ------------------------------------------------------------------------------------------------------

    async def told(self, call: Any) -> Any:
        """The response, or what refused the call."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            return error_of_call(error)

    def send(self, call: Callable[..., Any], *about: Any, **fields: Any) -> Any:
        """What a call is answered."""
        self.broken = True
        self.calls += 1
        answer = self.run(self.insist(partial(call, *about, **fields)))
        self.failing.at = None
        return answer

    async def insist(self, call: Callable[[], Any]) -> Any:
        """The answer, once what is sent at the same time and cancelled after some turns of the loop has been."""

        async def attempt(turns: int | None) -> Any:
            sent = asyncio.ensure_future(self.told(call()))
            if turns is None:
                return await sent
            for _ in range(turns):
                await asyncio.sleep(0)
            sent.cancel()
            await asyncio.wait([sent])
            return None

        answers = await asyncio.gather(*map(attempt, self.attempts))
        self.oracle.counts["echoes"] += len(self.attempts)
        answer = await self.told(call())
        while self.attempts and isinstance(answer, ExecutorError) and answer.reason == "STEP_FAILED":
            answer = await self.told(call())
        if self.attempts:
            answers = [each for each in (*answers, answer) if each is not None]
            good = [getattr(each, "output", each) for each in answers if not isinstance(each, ExecutorError)]
            assert sum(not each.replayed for each in good) <= 1, "applied twice"
            reasons = {each.reason for each in answers if isinstance(each, ExecutorError)}
            assert reasons <= {"STEP_FAILED", getattr(answer, "reason", None)}, "they share what one of them is told"
        return answer

    def ask(self, method: str, items: list[Item], all_or_nothing: bool = False) -> Callable[[], Any]:
        kind = getattr(messages, f"{method}Request")
        numbered = [item_message(item, 1000 + 7 * index) for index, item in enumerate(items)]
        batch = {"items": numbered, "all_or_nothing": all_or_nothing}
        request = kind(**batch) if method in BATCHES else kind(item=numbered[0])
        return partial(getattr(self.served.executor, method), request)

    def forward(self, method: str, items: list[Item], *, all_or_nothing: bool = False, failing: str | None = None):
        self.failing.at = failing or self.failing.at
        answer = self.send(self.ask(method, items, all_or_nothing))
        self.judge(method, items, answer, all_or_nothing=all_or_nothing, failing=failing)

    def judge(self, method: str, items: list[Item], answer: Any, **how: Any) -> list[Outcome] | Refused:
        """The answer to a forward call is what it must be."""
        refusal = answer if isinstance(answer, ExecutorError) else None
        expected = self.oracle.forward(
            items, SHAPES[method], refused=refusal.reason if refusal else None, single=method not in BATCHES, **how
        )
        note(f"{method} {items} {how} -> {refusal or 'OK'}; expected {expected}")
        if isinstance(expected, Refused):
            assert refusal, f"the call should have been refused with one of {set(expected.reasons)}"
            self.check_refusal(refusal, expected)
            self.forgive("replays", "kv_exhausted")
            return expected
        assert not refusal, f"refused without reason: {refusal}"
        if method in BATCHES:
            results = answer.results
            assert [result.item_id for result in results] == [1000 + 7 * index for index in range(len(items))]
        else:
            results = [forward_pb2.ItemResult(output=answer.output)]
        rows = RowReader(answer.row_blocks)
        for item, outcome, result in zip(items, expected, results, strict=True):
            self.check_result(SHAPES[method], item, outcome, result, rows)
        rows.done()
        if any(isinstance(outcome, Refused) for outcome in expected):
            self.forgive("replays")
        committed = [item for item, outcome in zip(items, expected, strict=True) if isinstance(outcome, Committed)]
        if committed and not self.attempts:
            assert answer.timing.step > self.steps
            self.steps = answer.timing.step
            assert answer.timing.step_tokens == sum(len(item.tokens) for item in committed)
        self.check_pressure(answer.pressure)
        return expected

    def check_result(self, shape: str, item: Item, outcome: Outcome, result: Any, rows: RowReader) -> None:
        if isinstance(outcome, Refused):
            assert result.WhichOneof("result") == "error", f"{item} should have been refused: {outcome}"
            refusal = error_of(result.error)
            self.check_refusal(refusal, outcome)
            self.oracle.counts["kv_exhausted"] += refusal.reason == EXHAUSTED
            return
        assert result.WhichOneof("result") == "output", f"{item} was refused: {result.error}"
        output = result.output
        if output.cached_tokens:
            assert isinstance(outcome, Committed) and outcome.sequence.family is not None
            reject()  # a relative has published these tokens, which were all that were left: see `unlike`
        if isinstance(outcome, Replayed):
            self.check_replay(item, outcome.record, output, rows)
            return
        assert not output.replayed or self.attempts
        self.oracle.learn(outcome.sequence, handle_of(output.handle))
        self.remember(outcome.sequence)
        assert output.HasField("rows") == bool(outcome.prefixes)
        found = None
        if outcome.prefixes:
            assert output.rows.count == len(outcome.prefixes)
            found = rows.take(output.rows, item.output)
            for index, prefix in enumerate(outcome.prefixes):
                row = {name: array[index] for name, array in found.items()}
                check_row(row, item.output, logits_after(prefix, self.config))
        if outcome.record is not None:
            outcome.record.handles, outcome.record.rows = (outcome.sequence.handle,), found
            self.sent.append((shape, item))

    def check_replay(self, item: Item, record: Record, output: Any, rows: RowReader) -> None:
        assert output.replayed
        assert handle_of(output.handle) == record.handles[0]
        if output.HasField("rows"):
            found = rows.take(output.rows, item.output, replayed=True)
            assert found.keys() == record.rows.keys()
            for name, array in record.rows.items():
                np.testing.assert_array_equal(found[name], array)
        else:
            assert not self.oracle.keeps_rows(record)

    def check_refusal(self, refusal: ExecutorError, expected: Refused) -> None:
        assert refusal.reason in expected.reasons, f"{refusal}; expected one of {set(expected.reasons)}"
        assert refusal.message
        told = refusal.message + "".join(refusal.metadata.values())
        assert CAUSE not in told and not any(each.hex() in told or each[8:].hex() in told for each in self.oracle.live)
        if refusal.reason == "SEQUENCE_VERSION_MISMATCH" and expected.sequence is not None:
            handle = expected.sequence.handle
            assert int(refusal.metadata["version"]) == handle.version
            assert int(refusal.metadata["seq_len"]) == handle.seq_len
        if refusal.reason == "TRUNCATE_BEYOND_LENGTH" and expected.sequence is not None:
            assert int(refusal.metadata["seq_len"]) == expected.sequence.length
        if refusal.reason == "CONTEXT_LENGTH_EXCEEDED":
            assert int(refusal.metadata["max_context"]) == self.limits.max_context
            if expected.sequence is not None:  # it may have been rolled back first
                assert int(refusal.metadata["seq_len"]) <= expected.sequence.length
        if "needed_blocks" in refusal.metadata:
            assert int(refusal.metadata["needed_blocks"]) > int(refusal.metadata["free_blocks"])

    def check_pressure(self, pressure: Any) -> None:
        blocks = self.oracle.blocks
        assert (pressure.total_blocks, pressure.block_size) == (blocks.total, blocks.size)
        assert (pressure.queued_items, pressure.queued_tokens) == (0, 0)
        assert pressure.sequences == len(self.oracle.live)
        assert pressure.free_blocks == blocks.free, f"free: {pressure.free_blocks}, expected {blocks.free}"

    def forgive(self, *counters: str) -> None:
        """Counters of which the contract does not say what a refused call adds."""

        async def look() -> Any:
            return (await self.served.status()).counters

        real = self.run(look())
        for name in counters:
            self.oracle.counts[name] = getattr(real, name)

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "served"):
            return
        oracle, state = self.oracle, self.served.server.state
        faults: list[BaseException] = []

        def inspect(runner: Any) -> None:
            """In the model thread, which would not survive an assertion."""
            try:
                runner.kv.check()
                assert runner.kv.state().free_blocks == oracle.blocks.free
                records = [record for record in state.handles.records() if not record.parked]
                assert sequences(runner.kv).keys() == {record.sequence for record in records}
                for record in records:
                    assert runner.kv.length(record.sequence) == record.length
                    self.check_content(runner, record.sequence, oracle.live[record.id])
                poison(runner)
            except BaseException as error:
                faults.append(error)

        async def look() -> Any:
            await self.served.between_steps(inspect)
            return await self.served.status()

        status, counts = self.run(look()), oracle.counts
        if faults:
            raise faults[0]
        stand = {each.id: (each.length, each.version, bool(each.parked)) for each in state.handles.records()}
        assert stand == {key: (each.length, each.handle.version, each.parked) for key, each in oracle.live.items()}
        assert not state.unnamed and status.blocks.parked_sequences == sum(each.parked for each in oracle.live.values())
        assert status.counters.sequences_parked == counts["parked"]
        assert not any(record.busy for record in state.handles.records())
        self.check_pressure(status.pressure)
        counters = status.counters
        assert counters.sequences_created == counts["created"]
        assert counters.sequences_released == counts["released"]
        assert counters.tokens == counts["tokens"]
        assert counters.rows == counts["rows"]
        assert counters.tokens_truncated == counts["truncated"]
        assert 0 <= counters.blocks_copied - counts["copied"] <= counts["kept"]
        assert 0 <= counters.replays - counts["replays"] <= counts["echoes"]
        assert 0 <= counts["kv_exhausted"] - counters.kv_exhausted <= counts["echoes"]
        assert state.replay.rows <= self.limits.replay_bytes
        assert state.replay.rows == sum(each.row_bytes for each in oracle.records.values() if oracle.keeps_rows(each))
        assert state.replay.records == sum(map(record_bytes, recorded(state.replay)))
        assert status.replay_bytes == state.replay.rows + state.replay.records
        self.broken = False

    def check_content(self, runner: Any, number: int, sequence: Sequence) -> None:
        """The cache holds what the tokens of the sequence stand for, in every layer."""
        if not sequence.length:
            return
        blocks = torch.tensor(table_of(runner.kv, number).tolist())
        expected = _embeddings(np.array(sequence.tokens), self.config)
        for store in (*runner.store.keys, *runner.store.values):
            held = store[blocks].flatten(0, 1)[: sequence.length].numpy()
            assert np.abs(held - expected).max() <= 1e-6, sequence  # of NaN it is not

    # --- choices ----------------------------------------------------------------------------------------------------

    def pick(self, data) -> Sequence:
        live = list(self.oracle.live.values())
        return live[data.draw(st.integers(0, len(live) - 1), label="sequence")]

    def tokens(self, data, most: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(self.limits.vocab) for _ in range(data.draw(st.integers(1, most), "tokens")))

    def remember(self, sequence: Sequence) -> None:
        for place, token in enumerate(sequence.tokens if sequence.family is not None else ()):
            self.followed[sequence.family, tuple(sequence.tokens[:place])].add(token)

    def unlike(self, handle: Handle | None, tokens: tuple[int, ...], start: int | None = None) -> tuple[int, ...]:
        """Tokens of which the first has followed on no relative: the oracle knows no blocks that chance finds."""
        sequence = None if handle is None else self.oracle.live.get(handle.id)
        if sequence is None or sequence.family is None:
            return tokens
        known = self.followed[sequence.family, tuple(sequence.tokens[:start])]
        others = [each for each in range(self.limits.vocab) if each not in known]
        return tokens if not others or tokens[0] not in known else (self.random.choice(others), *tokens[1:])

    def request_id(self, data, handle: Handle | None = None, *, sure: bool = False) -> str:
        """Unique on its sequence, or among the creations; not beyond."""
        if not sure and not data.draw(st.sampled_from([True, True, False]), label="with a request id"):
            return ""
        scope = None if handle is None else handle.id
        self.request_ids[scope] += 1
        return f"request-{self.request_ids[scope]}"

    def output(self, data) -> Output:
        positions = data.draw(st.sampled_from(["unset", "unset", "last", "all", "all", "none"]), label="positions")
        kind = data.draw(st.sampled_from(["unset", "greedy", "logprob", "top", "selected", "full"]), label="kind")
        match kind:
            case "top":
                return Output(positions, kind, k=data.draw(st.sampled_from([1, 2, 5, 20, 20])))
            case "selected":
                ids = data.draw(st.lists(st.integers(0, self.limits.vocab - 1), min_size=1, max_size=6))
                return Output(positions, kind, ids=tuple(ids))
            case "full":
                return Output(positions, kind, dtype=data.draw(st.sampled_from(list(DTYPES))))
            case _:
                return Output(positions, kind)

    def forge(self, data, real: Handle) -> Handle:
        """A handle that nobody was given."""
        how = data.draw(st.sampled_from(["foreign", "unknown", "cut", "long", "empty"]), label="forged")
        forged, reason = {
            "foreign": (bytes([real.id[0] ^ 1]) + real.id[1:], "INSTANCE_MISMATCH"),
            "unknown": (real.id[:-1] + bytes([real.id[-1] ^ 1]), "HANDLE_UNKNOWN"),
            "cut": (real.id[:-1], INVALID),
            "long": (real.id + b"\0", INVALID),
            "empty": (b"", INVALID),
        }[how]
        self.oracle.forged[forged] = {reason} if forged else {reason, "REQUEST_ID_REUSED"}
        return replace(real, id=forged)

    def wrong_handle(self, data, sequence: Sequence) -> Handle:
        """Released, stale, of another length or version, or forged."""
        handle, gone = sequence.handle, list(self.oracle.gone.values())
        match data.draw(
            st.sampled_from(["gone", "gone", "past", "longer", "newer", "forged", "forged"]), label="wrong"
        ):
            case "gone" if gone:
                return gone[data.draw(st.integers(0, len(gone) - 1))].handle
            case "past" if len(sequence.handles) > 1:
                return data.draw(st.sampled_from(sequence.handles[:-1]))
            case "newer":
                return replace(handle, version=handle.version + 1)
            case "longer":
                return replace(handle, seq_len=handle.seq_len + 1)
            case _:
                return self.forge(data, handle)

    def handle(self, data) -> Handle:
        sequence = self.pick(data)
        if data.draw(st.integers(0, 9), label="0: a wrong handle") == 0:
            return self.wrong_handle(data, sequence)
        return sequence.handle

    def back(self, data, handle: Handle) -> int | None:
        """Where to roll back to."""
        how = data.draw(st.sampled_from(["none", "none", "none", "some", "some", "all", "beyond"]), label="roll back")
        if how == "some":
            return max(0, handle.seq_len - data.draw(st.integers(0, 6)))
        return {"none": None, "all": 0, "beyond": handle.seq_len + 1 + data.draw(st.sampled_from([0, 2**30]))}[how]

    def new_item(self, data, most: int = 12) -> Item:
        return Item(
            None,
            self.tokens(data, most),
            output=self.output(data),
            request_id=self.request_id(data),
            reserve=data.draw(st.sampled_from([None, None, 0, 1, 5, 9, 2**32 - 1]), label="reserve"),
        )

    def old_item(self, data, most: int) -> Item:
        handle = self.handle(data)
        request_id = self.request_id(data, handle)
        tokens, back = self.tokens(data, most), self.back(data, handle)
        return Item(handle, self.unlike(handle, tokens, back), back, self.output(data), request_id)

    def spoil(self, data, item: Item) -> Item:
        """Make an item bad in some way."""
        vocab = self.limits.vocab
        outputs = [
            Output("last", "top", k=0),
            Output("last", "top", k=21),
            Output("last", "selected"),
            Output("last", "selected", ids=(vocab,)),
            Output("last", "selected", ids=(1,) * 7),
        ]
        match data.draw(st.sampled_from(["empty", "token", "output", "shape", "long", "id"]), label="spoilt"):
            case "empty":
                return replace(item, tokens=())
            case "token":
                worst = data.draw(st.sampled_from([vocab, 2**31 - 1, 2**31, 2**32 - 1]))
                return replace(item, tokens=(*item.tokens, worst))
            case "output":
                return replace(item, output=data.draw(st.sampled_from(outputs)))
            case "shape" if item.handle is None:
                return replace(item, truncate_to=1)
            case "shape":
                return replace(item, reserve=data.draw(st.sampled_from([0, 3])))
            case "long":
                return replace(item, tokens=(0,) * data.draw(st.sampled_from([44, 49, 61])))
            case _:
                return replace(item, request_id="é" * 65)

    def any_item(self, data) -> Item:
        """Mostly good."""
        how = data.draw(st.sampled_from(["new", "chunk", "decode", "decode", "decode", "again", "bad"]), label="item")
        if how == "again" and self.sent:
            return data.draw(st.sampled_from(self.sent), label="sent before")[1]
        if how == "new" or not self.oracle.live:
            return self.new_item(data)
        if how == "bad":
            item = self.old_item(data, 3) if data.draw(st.booleans()) else self.new_item(data)
            return self.spoil(data, item)
        return self.old_item(data, 9 if how == "chunk" else 1)

    def stage(self, data) -> str | None:
        """Where the step fails: seldom anywhere."""
        stages = ["reserve", "plan", "forward", "select", "commit"]
        return data.draw(st.sampled_from([None] * 20 + stages), label="fails at")

    # --- forward ----------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def prefill(self, data):
        item = self.new_item(data)
        if data.draw(st.integers(0, 9)) == 0:
            item = self.spoil(data, item)
        self.forward("Prefill", [item], failing=self.stage(data))

    @rule(data=st.data())
    def prefill_that_takes_what_is_left(self, data):
        """Exactly all free blocks, or one token more."""
        most = min(self.oracle.blocks.free * self.oracle.blocks.size, 40)
        count = most + data.draw(st.sampled_from([-5, -1, 0, 0, 1]))
        item = Item(None, tuple(self.random.randrange(self.limits.vocab) for _ in range(max(1, count))))
        self.forward("Prefill", [replace(item, request_id=self.request_id(data))])

    @precondition(some_live)
    @rule(data=st.data())
    def chunk(self, data):
        item = self.old_item(data, 9)
        if data.draw(st.integers(0, 9)) == 0:
            item = self.spoil(data, item)
        self.forward("Prefill", [item], failing=self.stage(data))

    @precondition(some_live)
    @rule(data=st.data())
    def decode(self, data):
        self.forward("Decode", [self.old_item(data, 1)], failing=self.stage(data))

    @precondition(some_live)
    @rule(data=st.data())
    def decode_of_the_wrong_form(self, data):
        item = data.draw(st.sampled_from([self.new_item(data, 1), self.old_item(data, 3)]))
        self.forward(data.draw(st.sampled_from(["Decode", "ForwardVerify"])), [item])

    @precondition(some_live)
    @rule(data=st.data())
    def verify(self, data):
        self.forward("ForwardVerify", [self.old_item(data, 6)], failing=self.stage(data))

    @precondition(some_live)
    @rule(data=st.data(), rounds=st.integers(1, 3))
    def speculate(self, data, rounds):
        """Feed a draft, accept a part of it, and roll the rest back with the next one."""
        sequence = self.pick(data)
        for _ in range(rounds):
            before = sequence.length
            draft = self.unlike(sequence.handle, self.tokens(data, 5))
            self.forward("ForwardVerify", [Item(sequence.handle, draft, output=self.output(data))])
            back = before + data.draw(st.integers(0, sequence.length - before), label="accepted")
            draft = self.unlike(sequence.handle, self.tokens(data, 5), back)
            self.forward("ForwardVerify", [Item(sequence.handle, draft, back)])

    @rule(
        data=st.data(),
        method=st.sampled_from(["UnifiedForward", "UnifiedForward", "BatchDecode", "BatchPrefill"]),
        count=st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7]),
        all_or_nothing=st.booleans(),
    )
    def batch(self, data, method, count, all_or_nothing):
        items = [self.any_item(data) for _ in range(count)]
        if data.draw(st.booleans(), label="all want the same"):
            output = self.output(data)
            before = [item for _, item in self.sent]
            items = [item if item in before else replace(item, output=output) for item in items]
        if count > 1 and data.draw(st.integers(0, 7), label="0: an item twice") == 0:
            items[-1] = items[0]
        elif data.draw(st.integers(0, 3), label="not 0: no sequence twice"):
            kept: dict[bytes | int, Item] = {}
            for index, item in enumerate(items):
                kept.setdefault(item.handle.id if item.handle else index, item)
            items = list(kept.values())
        self.forward(method, items, all_or_nothing=all_or_nothing, failing=self.stage(data))

    # --- operations -------------------------------------------------------------------------------------------------

    def operate(self, kind: str, arguments: tuple[Any, ...]) -> None:
        """Send a truncate, fork, release or reserve and compare."""
        handle = arguments[0]
        names = {
            "truncate": ("length", "request_id"),
            "fork": ("count", "at_length", "request_id"),
            "release": ("any_version", "request_id"),
            "reserve": ("tokens",),
        }
        fields = dict(zip(names[kind], arguments[1:], strict=True))
        answer = self.send(getattr(self.served, kind), handle_message(handle), **fields)
        expected = getattr(self.oracle, kind)(*arguments)
        note(f"{kind} {arguments} -> {answer}; expected {expected}")
        if self.was_refused(answer, expected, self.oracle.live.get(handle.id)):
            self.forgive("kv_exhausted")
            return
        handles = () if kind == "release" else answer.handles if kind == "fork" else (answer.handle,)
        told = tuple(handle_of(each) for each in handles)
        if isinstance(expected, Replayed):
            assert answer.replayed and told == expected.record.handles
        elif kind == "reserve":
            assert told == (expected.handle,), "nothing in the sequence changed"
        else:
            assert not answer.replayed or self.attempts
            changed = expected if kind == "fork" else [expected] if kind == "truncate" else []
            for sequence, each in zip(changed, told, strict=True):
                self.oracle.learn(sequence, each)
            if arguments[-1]:
                self.oracle.records[handle.id, arguments[-1]].handles = told
                self.operations.append((kind, arguments))
        self.check_pressure(answer.pressure)

    @precondition(some_live)
    @rule(data=st.data())
    def truncate(self, data):
        handle = self.handle(data)
        length = self.back(data, handle)
        self.operate("truncate", (handle, handle.seq_len if length is None else length, self.request_id(data, handle)))

    @precondition(some_live)
    @rule(data=st.data(), count=st.sampled_from([0, 1, 1, 2, 3, 7]))
    def fork(self, data, count):
        handle = self.handle(data)
        self.operate("fork", (handle, count, self.back(data, handle), self.request_id(data, handle)))

    @precondition(some_live)
    @rule(data=st.data(), count=st.integers(1, 3), all_or_nothing=st.booleans())
    def fork_and_diverge(self, data, count, all_or_nothing):
        """Parent and children write behind the blocks that they share, in one step."""
        parent = self.pick(data)
        at = data.draw(st.sampled_from([None, None, max(0, parent.length - 1), max(0, parent.length - 5)]), label="at")
        known = set(self.oracle.live)
        self.operate("fork", (parent.handle, count, at, self.request_id(data, parent.handle)))
        family = [parent, *(each for key, each in self.oracle.live.items() if key not in known)]
        items = []
        for each in family:
            tokens, back = self.tokens(data, 3), self.back(data, each.handle)
            items.append(Item(each.handle, self.unlike(each.handle, tokens, back), back, self.output(data)))
        self.forward("UnifiedForward", items, all_or_nothing=all_or_nothing, failing=self.stage(data))

    @precondition(some_live)
    @rule(data=st.data(), any_version=st.booleans())
    def release(self, data, any_version):
        handle = self.handle(data)
        self.operate("release", (handle, any_version, self.request_id(data, handle)))

    @precondition(some_live)
    @rule(data=st.data(), tokens=st.sampled_from([0, 1, 3, 4, 8, 17, 61, 2**32 - 1]))
    def reserve(self, data, tokens):
        self.operate("reserve", (self.handle(data), tokens))

    def others_may_take_the_rest(self, data):
        if data.draw(st.booleans(), label="others take the rest") and self.oracle.blocks.free:
            most = min(self.oracle.blocks.free * self.oracle.blocks.size, 40)
            self.forward("Prefill", [Item(None, (0,) * most)])

    @precondition(some_live)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def use_what_was_reserved(self, data, tokens):
        """Whatever others take and whatever fails in between."""
        sequence = self.pick(data)
        self.operate("reserve", (sequence.handle, tokens))
        self.others_may_take_the_rest(data)
        fed = Item(sequence.handle, self.unlike(sequence.handle, self.tokens(data, tokens)), output=self.output(data))
        failing = data.draw(st.sampled_from(["plan", "forward", "select", "commit", None]), label="fails at")
        self.forward("Prefill", [fed], failing=failing)
        if failing:
            self.forward("UnifiedForward", [fed])

    # --- out of the cache and back ----------------------------------------------------------------------------------

    @precondition(some_live)
    @rule(data=st.data())
    def park(self, data):
        """The next call on it brings it back, whichever that is."""
        handle = self.handle(data)
        sequence = self.oracle.live.get(handle.id)
        if sequence is not None and self.oracle.finds_blocks(sequence):
            return
        answer = self.send(self.served.park, handle_message(handle))
        expected = self.oracle.park(handle)
        note(f"park {handle} -> {answer}; expected {expected}")
        if not self.was_refused(answer, expected, sequence):
            assert (handle_of(answer.handle), answer.freed_blocks) == (handle, expected)
            self.check_pressure(answer.pressure)
            self.others_may_take_the_rest(data)
            match data.draw(
                st.sampled_from(["later", "step", "verify", "truncate", "fork", "reserve"]), "it returns by"
            ):
                case "step" | "verify" as how:
                    item = Item(handle, self.tokens(data, 3), output=self.output(data))
                    self.forward("ForwardVerify" if how == "verify" else "UnifiedForward", [item])
                case "truncate":
                    self.operate("truncate", (handle, handle.seq_len - 1, ""))
                case "fork":
                    self.operate("fork", (handle, 1, None, ""))
                case "reserve":
                    self.operate("reserve", (handle, 4))

    def was_refused(self, answer: Any, expected: Any, sequence: Sequence | None = None) -> bool:
        """Whether an operation was refused, as it must be where reasons are ``expected``."""
        if isinstance(expected, frozenset):
            assert isinstance(answer, ExecutorError), f"it should have been refused with one of {set(expected)}"
            self.check_refusal(answer, Refused(expected, sequence))
            return True
        assert not isinstance(answer, ExecutorError), answer
        return False

    @precondition(some_live)
    @rule(
        data=st.data(),
        chunk_tokens=st.sampled_from([0, 1, 5]),
        reserve=st.sampled_from([0, 0, 1, 9, 61]),
        cached=st.booleans(),
        how=st.sampled_from(["at once", "in two streams", "given up"]),
    )
    def move(self, data, chunk_tokens, reserve, cached, how):
        """Export a sequence, and import it as another one beside it, or a part of it and no more."""
        self.broken = True
        handle = self.handle(data)
        frames = self.run(self.told(exported(self.served, handle_message(handle), chunk_tokens=chunk_tokens)))
        source = self.oracle.export(handle)
        note(f"export {handle} -> {frames if isinstance(frames, ExecutorError) else len(frames)}; expected {source}")
        if self.was_refused(frames, source, self.oracle.live.get(handle.id)):
            self.forgive("kv_exhausted")
            return
        assert list(frames[0].layout.token_ids) == source.tokens
        chunks = chunks_of(frames)
        expected = self.oracle.begin_import(list(source.tokens), reserve, cached=cached)
        options: dict[str, Any] = {"reserve_tokens": reserve}
        if cached:
            options |= {"cache_mode": forward_pb2.CACHE_MODE_UNSPECIFIED, "cache_salt": b"%d" % next(SALTS)}
        if how == "given up":
            options["lease_id"] = self.send(self.served.acquire).lease_id
        first, rest = header(frames[0].layout, f" {next(SALTS)}", **options), brought(chunks)
        some = rest[: data.draw(st.integers(0, len(chunks)), label="chunks of the first stream")]
        if how != "at once" and not isinstance(expected, frozenset):
            answer = self.run(self.told(imported(self.served, first, *some)))
            whole = some[self.config.layers - 1 :: self.config.layers]  # tokens that came in all layers
            assert answer.next_token == sum(each.chunk.keys.shape[0] for each in whole)
        if how == "given up":
            begun = not isinstance(expected, frozenset)
            if begun:
                self.oracle.blocks.release(expected, self.oracle.live.values())
            assert self.send(self.served.revoke, options["lease_id"]).released_sequences == begun
            return
        if isinstance(expected, frozenset):
            rest = []  # gRPC may lose the refusal of the header to what is written behind it
        answer = self.run(self.told(imported(self.served, first, *rest)))
        note(f"import with {options} -> {answer}; expected {expected}")
        if not self.was_refused(answer, expected):
            self.oracle.learn(expected, handle_of(answer.handle))
            self.remember(expected)
            self.oracle.counts["created"] += 1
            self.check_pressure(answer.pressure)

    @precondition(lambda self: self.calls > 25)
    @rule(foreign=st.booleans())
    def reset(self, foreign):
        answer = self.send(self.served.control.Reset, control.ResetRequest(instance_id="00" * 8 if foreign else ""))
        if foreign:
            assert answer.reason == "INSTANCE_MISMATCH"
            return
        self.calls = 0
        assert answer.released_sequences == len(self.oracle.live)
        for sequence in list(self.oracle.live.values()):
            self.oracle.remove(sequence)
        self.check_pressure(answer.pressure)

    @precondition(lambda self: self.calls > 15)
    @rule(batch_size=st.sampled_from([0, 1, 5, 99]), prefill_tokens=st.sampled_from([0, 1, 30, 49, 1000]))
    def warm_up(self, batch_size, prefill_tokens):
        """Whatever it runs, and however little room it has, it leaves nothing."""
        request = control.WarmupRequest(batch_size=batch_size, prefill_tokens=prefill_tokens)
        answer = self.send(self.served.control.Warmup, request)
        if isinstance(answer, ExecutorError):
            self.check_refusal(answer, Refused(frozenset({INVALID, EXHAUSTED, TOO_MANY})))
        else:
            if answer.steps:
                self.oracle.warmed_up()
            self.check_pressure(answer.pressure)
        self.forgive("tokens", "rows", "kv_exhausted")

    # --- request ids ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), same=st.sampled_from([True, True, False]))
    def resend_an_item(self, data, same):
        """The recorded answer, whatever became of the sequence, and whichever call carries it."""
        shape, item = data.draw(st.sampled_from(self.sent), label="sent before")
        if not same:
            item = data.draw(
                st.sampled_from(
                    [
                        replace(item, tokens=(*item.tokens, 1)),
                        replace(item, tokens=(*item.tokens[:-1], (item.tokens[-1] + 1) % self.limits.vocab)),
                        replace(item, output=Output("last", "top", k=3)),
                        replace(item, output=Output("none")),
                        replace(item, truncate_to=0) if item.handle else replace(item, reserve=4),
                    ]
                ),
                label="other content",
            )
        methods = ["ForwardVerify"] if shape == "verify" else ["Prefill", "UnifiedForward", "BatchPrefill"]
        if item.handle is not None and len(item.tokens) == 1:
            methods += ["Decode", "BatchDecode", "ForwardVerify"]
        self.forward(data.draw(st.sampled_from(methods), label="method"), [item])

    @precondition(lambda self: self.operations)
    @rule(data=st.data(), same=st.sampled_from([True, True, False]))
    def resend_an_operation(self, data, same):
        kind, arguments = data.draw(st.sampled_from(self.operations), label="done before")
        if not same:
            other = {"truncate": arguments[1] + 1, "fork": (arguments[1] or 1) + 1, "release": not arguments[1]}
            arguments = (arguments[0], other[kind], *arguments[2:])
        self.operate(kind, arguments)

    # --- at the same time -------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        what=st.sampled_from(["new", "decode", "verify", "truncate", "fork", "release"]),
        attempts=st.lists(st.sampled_from(MOMENTS), min_size=1, max_size=4),
    )
    def repeat_and_cancel(self, data, what, attempts):
        """A request id is sent several times at once, some calls are cancelled at any moment, a step fails. Then it is
        sent until it is answered: it is applied once."""
        handle = self.pick(data).handle if self.oracle.live and what != "new" else None
        request_id = self.request_id(data, handle, sure=True)
        self.attempts = attempts
        stages = ["reserve", "forward", "select", "commit"]
        self.failing.at = data.draw(st.sampled_from([*4 * [None], *stages]), label="fails at")
        try:
            if handle is not None and what == "truncate":
                self.operate("truncate", (handle, max(0, handle.seq_len - 1), request_id))
            elif handle is not None and what == "fork":
                self.operate("fork", (handle, 2, None, request_id))
            elif handle is not None and what == "release":
                self.operate("release", (handle, False, request_id))
            else:
                tokens = self.unlike(handle, self.tokens(data, 1 if what == "decode" else 3))
                item = Item(handle, tokens, output=Output("last", "greedy"), request_id=request_id)
                method = "Prefill" if handle is None else {"decode": "Decode"}.get(what, "ForwardVerify")
                self.forward(method, [item])
        finally:
            self.attempts = []

    def send_together(self, calls: list[tuple[str, Item]]) -> list[Any]:
        self.broken = True

        async def together() -> list[Any]:
            return await asyncio.gather(*(self.told(self.ask(method, [item])()) for method, item in calls))

        return self.run(together())

    @precondition(some_live)
    @rule(data=st.data(), count=st.integers(2, 4))
    def race_for_a_sequence(self, data, count):
        """At most one of several calls on the same handle is applied, and the losers are told why."""
        handle = self.pick(data).handle
        named = data.draw(st.booleans(), label="all with a request id")  # who wins must not decide what is drawn later
        ids = [self.request_id(data, handle, sure=True) if named else "" for _ in range(count)]
        items = [Item(handle, self.tokens(data, 1), request_id=each) for each in ids]
        answers = self.send_together([("Decode", item) for item in items])
        won = [index for index, answer in enumerate(answers) if not isinstance(answer, ExecutorError)]
        assert len(won) <= 1, "two calls on one handle were both applied"
        first = won[0] if won else next(i for i, each in enumerate(answers) if each.reason != "SEQUENCE_BUSY")
        expected = self.judge("Decode", [items[first]], answers[first])
        lost = {"SEQUENCE_BUSY", "SEQUENCE_VERSION_MISMATCH"} if won else {"SEQUENCE_BUSY", *expected.reasons}
        for index, answer in enumerate(answers):
            if index != first:
                self.check_refusal(answer, Refused(frozenset(lost)))

    @rule(data=st.data(), count=st.integers(2, 5))
    def duplicates_at_the_same_time(self, data, count):
        """One is applied, all share its answer."""
        if data.draw(st.booleans(), label="new") or not self.oracle.live:
            item = replace(self.new_item(data), request_id=self.request_id(data, sure=True))
            methods = st.sampled_from(["Prefill", "UnifiedForward", "BatchPrefill"])
        else:
            handle = self.pick(data).handle
            request_id = self.request_id(data, handle, sure=True)
            item = Item(handle, self.tokens(data, 1), None, self.output(data), request_id)
            methods = st.sampled_from(["Decode", "UnifiedForward", "BatchDecode", "Prefill"])
        calls = [(data.draw(methods, label="method"), item) for _ in range(count)]
        answers = self.send_together(calls)
        outputs = [self.only_output(answer) for answer in answers]
        fresh = [i for i, output in enumerate(outputs) if not isinstance(output, ExecutorError) and not output.replayed]
        if not fresh:
            expected = self.oracle.forward([item], "any", refused=outputs[0].reason, single=True)
            assert isinstance(expected, Refused)
            for output in outputs:
                self.check_refusal(output, expected)
            self.forgive("replays", "kv_exhausted")
            return
        assert len(fresh) == 1, "applied twice"
        method = calls[fresh[0]][0]
        expected = self.judge(method, [item], answers[fresh[0]])
        for index, (output, answer) in enumerate(zip(outputs, answers, strict=True)):
            if index != fresh[0]:
                rows = RowReader(answer.row_blocks)
                self.oracle.counts["replays"] += 1
                self.check_replay(item, expected[0].record, output, rows)
                rows.done()

    @staticmethod
    def only_output(answer: Any) -> Any:
        if isinstance(answer, ExecutorError):
            return answer
        if not hasattr(answer, "results"):
            return answer.output
        result = answer.results[0]
        return result.output if result.HasField("output") else error_of(result.error)

    @rule(data=st.data(), count=st.integers(2, 5))
    def strangers_at_the_same_time(self, data, count):
        """Calls that have nothing to do with each other meet in a step, and each gets its own."""
        live = [each for each in self.oracle.live.values() if not each.parked]
        idle = [each for each in live if not each.promised and each.length + 4 < 60]
        chosen = [idle[i] for i in data.draw(st.sets(st.integers(0, len(idle) - 1), max_size=count))] if idle else []
        items = [
            Item(each.handle, self.unlike(each.handle, self.tokens(data, 4)), output=self.output(data))
            for each in chosen
        ]
        room = self.limits.max_sequences - len(self.oracle.live)
        new = min(count - len(chosen), room)
        items += [Item(None, self.tokens(data, 6), output=self.output(data)) for _ in range(new)]
        if sum(self.oracle.blocks.blocks_for(len(i.tokens)) + 1 for i in items) > self.oracle.blocks.free:
            return
        answers = self.send_together([("UnifiedForward", item) for item in items])
        steps: dict[int, list[int]] = {}
        for index, answer in enumerate(answers):
            assert not isinstance(answer, ExecutorError), answer
            steps.setdefault(answer.timing.step, []).append(index)
        for step in sorted(steps):
            together = [items[index] for index in steps[step]]
            expected = self.oracle.forward(together, "any", refused=None, calls=len(together))
            for index, outcome in zip(steps[step], expected, strict=True):
                rows = RowReader(answers[index].row_blocks)
                self.check_result("any", items[index], outcome, answers[index].results[0], rows)
                rows.done()
            fed = [
                len(each.tokens)
                for each, outcome in zip(together, expected, strict=True)
                if isinstance(outcome, Committed)
            ]
            assert answers[steps[step][0]].timing.step_tokens == sum(fed)
            self.steps = max(self.steps, step)  # 0: refused before a step
        # Which of them ran first is the machine's choice; what later rules may choose from must not depend on it.
        for answer in answers[len(chosen) :]:
            if answer.results[0].HasField("output"):
                key = answer.results[0].output.handle.id
                self.oracle.live[key] = self.oracle.live.pop(key)


ExecutorMachine.TestCase.settings = settings(
    max_examples=max(1, int(60 * ROUNDS)),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[phase for phase in Phase if phase is not Phase.explain],
    print_blob=True,
)
TestEveryHistory = ExecutorMachine.TestCase
