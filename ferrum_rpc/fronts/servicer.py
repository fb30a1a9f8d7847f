"""The methods of the ``vllm_engine`` protocol on a scheduler.

`port` calls them, and makes what they raise a status of the protocol. A call that its client leaves is cancelled, and
with it its texts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import numpy as np
import structlog
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from ferrum_rpc import __version__
from ferrum_rpc.client import (
    NO_ANSWER,
    SEQUENCE_GONE,
    TRY_LATER,
    Draining,
    ExecutorClient,
    ExecutorError,
    ExecutorInfo,
    GrammarTooComplex,
    HiddenStates,
    InvalidRequest,
    OutputSpec,
    Positions,
    QueueFull,
    RowLogprobs,
    StreamToken,
    TransportError,
)
from ferrum_rpc.client.fleet import Members
from ferrum_rpc.fronts.answers import ChoiceMessages, PromptScores, prompt_scores
from ferrum_rpc.fronts.blocks import BlockReport, BlockWatcher
from ferrum_rpc.fronts.folder import ModelFolder, in_chunks
from ferrum_rpc.fronts.load import WorkLoad
from ferrum_rpc.fronts.requests import MOST_TEXTS, Generation, generation_of, prompt_of
from ferrum_rpc.scheduler import RequestEnd, Scheduler, TextRequest, TokenStream
from ferrum_rpc.service.guard.auth import CALLER

Found = TypeVar("Found")

SERVER_TYPE: Final = "vllm-grpc"
GRAMMARS_BEGIN: Final = "first_token"
TRIES: Final = 3
"""Executors at which a prompt is scored or embedded, if the ones before are gone or full."""

UNREAD_S: Final = 30.0
"""A text is ended if its client has read nothing for so long: its tokens wait here meanwhile."""

SCORES_AT_ONCE: Final = 8
"""Prompts that are scored or embedded at once: they are outside the scheduler's admission."""

CALLER_SHARE: Final = 0.5
"""Of the texts that may be held, for one of several callers."""

MAX_SCORES_BYTES: Final = 256 << 20
SCORE_BYTES: Final = 16
"""Of the scores of prompts that are not sent yet, and of one of them."""

LARGE_BYTES: Final = 64 << 10
LARGE_TEXT: Final = 1 << 10
"""Bytes of a request, and characters of its text. Below them it takes milliseconds to read."""

ELSEWHERE: Final = (*NO_ANSWER, *SEQUENCE_GONE, *TRY_LATER)

log = structlog.get_logger("ferrum_rpc.fronts")

Send = Callable[[Any], Awaitable[None]]


class CacheEventsCursor(Exception):
    """A subscription that is to continue an earlier one, which is not offered."""


class ConstraintFailed(Exception):
    """A text that has begun cannot go on under its constraint."""


class ScoreCapacity:
    """``size`` bytes. Who wants some waits for them; who wants more than all waits for all."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def held(self, size: int) -> AsyncIterator[None]:
        """Hold so many bytes."""
        size = min(size, self._size)
        async with self._freed:
            await self._freed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            self._free += size
            async with self._freed:
                self._freed.notify_all()


class EngineMethods:
    """What the protocol's methods do. ``model_name``: under which the router lists the model. ``draining``: set by
    `drain`; no more texts are taken. ``score_turns``: for what computes rows and keeps nothing."""

    def __init__(
        self, scheduler: Scheduler, members: Members, folder: ModelFolder, load: WorkLoad, *, model_name: str = ""
    ) -> None:
        self.draining = False
        self.members = members
        self._scheduler = scheduler
        self._folder = folder
        self.load = load
        self._model_name = model_name
        self._report = BlockReport()
        self._watcher = BlockWatcher(members, self._report)
        self._streams: dict[str, list[TokenStream]] = {}
        self.score_turns = asyncio.Semaphore(SCORES_AT_ONCE)
        self._large = asyncio.Lock()
        self._score_capacity = ScoreCapacity(MAX_SCORES_BYTES)
        self._texts = Counter[str]()
        self._sending: dict[int, tuple[float, list[TokenStream]]] = {}

    async def watch(self) -> None:
        """Follow the executors' caches, and end the texts that are not read, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watcher.watch())
            group.create_task(self._end_unread())

    async def _end_unread(self) -> None:
        while True:
            await asyncio.sleep(UNREAD_S / 4)
            late = time.monotonic() - UNREAD_S
            for since, streams in list(self._sending.values()):
                for stream in streams if since < late else ():
                    stream.cancel()

    async def drain(self) -> None:
        """Take no more texts, and wait until those that were taken have ended."""
        self.draining = True
        await self._scheduler.drain()

    @property
    def healthy(self) -> bool:
        """Whether texts are taken and an executor serves."""
        return not self.draining and bool(self.members.serving)

    @property
    def texts(self) -> int:
        """Texts that have not ended."""
        return self.load.requests

    # --- texts ------------------------------------------------------------------------------------------------------

    async def generate(self, request: Any, send: Send) -> None:
        """``Generate``: a message for new tokens of each text if it is streamed, and a last one for each text."""
        async with AsyncExitStack() as leaving:
            leaving.enter_context(self._held(min(max(1, request.sampling_params.n), MOST_TEXTS)))
            generation = await self._generation(request)
            text = await self._constrained(generation)
            scores = await self._prompt_scores(generation, leaving)
            streams = self._submit(text, generation.n)
            for stream in streams:
                leaving.callback(self._leave, generation.request_id, stream)
                self._streams.setdefault(generation.request_id, []).append(stream)
            self._watcher.learn(text.prompt)
            choices = [ChoiceMessages(generation, *each, scores) for each in enumerate(streams)]
            try:
                await self._send_texts(generation, streams, choices, send)
            except (GrammarTooComplex, InvalidRequest) as error:
                if generation.constraint is None or "grammar" not in (error.field or "grammar"):
                    raise
                raise ConstraintFailed(error.message) from error
            self.load.cached_tokens += streams[0].cached_tokens
            for stream in streams:
                self._watcher.learn([*text.prompt, *stream.token_ids])

    def check_room(self, texts: int = 1) -> None:
        """Raise `QueueFull` if the caller may not have so many texts more."""
        caller, most = CALLER.get(), self.load.max_texts
        of_caller = int(most * CALLER_SHARE) if caller.shares else most
        if (held := self._texts.total()) + texts > most or self._texts[caller.name] + texts > of_caller:
            raise QueueFull(f"{held} texts are not sent yet")

    @contextmanager
    def _held(self, texts: int) -> Iterator[None]:
        """Hold texts of a caller until they are sent. Raises `QueueFull`."""
        self.check_room(texts)
        name = CALLER.get().name
        self._texts[name] += texts
        try:
            yield
        finally:
            self._texts[name] -= texts
            if not self._texts[name]:
                del self._texts[name]

    async def _generation(self, request: Any) -> Generation:
        """A request in the scheduler's terms. A large one is read in a thread: it may take a second."""
        caller = CALLER.get()
        tenant = caller.name if caller.shares else ""
        given = request, await self._info(), self._max_context, self._folder.tokenizer, tenant
        if request.ByteSize() <= LARGE_BYTES and len(request.text) <= LARGE_TEXT:
            return generation_of(*given)
        async with self._large:
            return await asyncio.to_thread(generation_of, *given)

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise Draining("the worker is draining")

    async def _constrained(self, generation: Generation) -> TextRequest:
        if generation.constraint is None:
            return generation.text
        self._refuse_when_draining()
        grammar = await self._scheduler.register_grammar(*generation.constraint)
        return generation.constrained(grammar)

    def _submit(self, text: TextRequest, n: int) -> list[TokenStream]:
        self._refuse_when_draining()
        streams = self._scheduler.submit_choices(text, n)
        self.load.requests += n
        self.load.prompt_tokens += len(text.prompt)
        self.load.waiting_tokens += len(text.prompt)
        return streams

    def _leave(self, request_id: str, stream: TokenStream) -> None:
        """A text has ended, or its client has left."""
        stream.cancel()
        end = stream.end or RequestEnd.CANCELLED
        self.load.requests -= 1
        self.load.finished[end.name.lower()] += 1
        others = self._streams[request_id]
        others.remove(stream)
        if not others:
            del self._streams[request_id]

    async def _send_texts(
        self, generation: Generation, streams: list[TokenStream], choices: list[ChoiceMessages], send: Send
    ) -> None:
        load, waits = self.load, True
        try:
            async with aclosing(_together(streams)) as together:
                async for index, tokens in together:
                    if waits:
                        waits = False
                        load.waiting_tokens -= len(generation.text.prompt)
                    load.chosen_tokens += len(tokens)
                    choice = choices[index]
                    if tokens and not generation.stream:
                        choice.collect(tokens)
                        continue
                    self._sending[id(streams)] = time.monotonic(), streams
                    await send(choice.chunk(tokens) if tokens else choice.complete())
                    del self._sending[id(streams)]
        finally:
            self._sending.pop(id(streams), None)
            load.waiting_tokens -= len(generation.text.prompt) if waits else 0

    async def abort(self, request: Any) -> Any:
        """``Abort``: the texts end where they are, with the reason ``abort``. Unknown requests have ended."""
        for request_id in request.request_ids:
            for stream in list(self._streams.get(request_id, ())):
                stream.cancel()
        return pb.AbortResponse()

    # --- prompts ----------------------------------------------------------------------------------------------------

    async def _prompt_scores(self, generation: Generation, leaving: AsyncExitStack) -> PromptScores | None:
        """The scores of the prompt, if they are wanted. They take capacity until ``leaving`` is closed."""
        if (top := generation.prompt_logprobs) is None:
            return None
        prompt, answer = generation.text.prompt, None
        await leaving.enter_async_context(self._score_capacity.held(SCORE_BYTES * (1 + top) * len(prompt)))
        if len(prompt) > 1:
            logprobs = RowLogprobs(top) if top else None
            answer = await self._somewhere(lambda client: client.score(prompt, logprobs=logprobs))
        return prompt_scores(prompt, answer, top)

    async def embed(self, request: Any) -> Any:
        """``Embed``: the last token's row behind the final norm, at length 1, as vLLM pools a model that generates."""
        if not request.HasField("tokenized"):
            raise InvalidRequest("EmbedRequest requires tokenized input", field="tokenized")
        info = await self._info()
        prompt = prompt_of(request.tokenized, info, self._max_context)

        async def last_row(client: ExecutorClient) -> np.ndarray[Any, np.dtype[np.float32]]:
            async with client.sequence() as sequence:
                answer = await sequence.prefill(prompt, OutputSpec(Positions.LAST, HiddenStates()))
                found: np.ndarray[Any, np.dtype[np.float32]] = answer.hidden_states[0]
                return found

        with self._held(1):
            row = await self._somewhere(last_row)
        length = float(np.linalg.norm(row))
        found = row / length if length > 0 else row
        return pb.EmbedResponse(embedding=found.tolist(), prompt_tokens=len(prompt), embedding_dim=len(found))

    async def _somewhere(self, run: Callable[[ExecutorClient], Awaitable[Found]]) -> Found:
        """Run something that keeps nothing at the executor that has least to do; at another one if that is lost."""
        self._refuse_when_draining()  # before it waits for its turn, and once more when it has it
        async with self.score_turns:
            for left in reversed(range(TRIES)):
                self._refuse_when_draining()
                await self._scheduler.ready()
                serving = self.members.serving
                try:
                    return await run(min(serving, key=_queued).client)
                except ExecutorError as error:
                    if not (left and isinstance(error, ELSEWHERE)):
                        raise
                    await asyncio.gather(*map(self.members.look, serving))
        raise TransportError("no executor has answered")

    # --- about the worker -------------------------------------------------------------------------------------------

    async def _info(self) -> ExecutorInfo:
        self._refuse_when_draining()
        return await self._scheduler.info()

    @property
    def _max_context(self) -> int:
        """The longest context of an executor that is there."""
        return max(each.max_context for each in self.members.there)

    async def health_check(self, request: Any) -> Any:
        """``HealthCheck``: whether an executor serves and the worker takes texts."""
        message = "Health" if self.healthy else "the worker is draining" if self.draining else "no executor serves"
        return pb.HealthCheckResponse(healthy=self.healthy, message=message)

    async def get_model_info(self, request: Any) -> Any:
        """``GetModelInfo``."""
        info = await self._info()
        model, folder, longest = info.model, self._folder, self._max_context
        return pb.GetModelInfoResponse(
            model_path=str(folder.path),
            is_generation=True,
            max_context_length=longest,
            vocab_size=model.vocab_size,
            served_model_name=self._model_name or model.name,
            tokenizer_path=str(folder.path),
            model_type=folder.model_type,
            architectures=folder.architectures or [model.architecture],
            eos_token_ids=model.eos_token_ids,
            pad_token_id=folder.pad_token_id,
            bos_token_id=model.bos_token_id or 0,
            max_req_input_len=longest,
            default_sampling_params_json=folder.sampling_defaults(),
        )

    async def get_server_info(self, request: Any) -> Any:
        """``GetServerInfo``."""
        info = await self._info()
        return pb.GetServerInfoResponse(
            active_requests=self.load.requests,
            is_paused=self.draining,
            uptime_seconds=self.load.uptime_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            kv_cache_dtype=info.model.kv_dtype,
            block_size=info.block_size,
            attention_backend=info.device.attention_backend,
            model_dtype=info.model.weight_dtype,
            max_num_seqs=self.load.max_running * len(self.members.serving),
            constrained_decoding_start=GRAMMARS_BEGIN,
        )

    async def get_loads(self, request: Any) -> Any:
        """``GetLoads``: of all executors together, as one rank."""
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=f"ferrum-rpc {__version__}",
            dp_rank_count=1,
            loads=[self.load.message()],
        )

    async def get_tokenizer(self, request: Any, send: Send) -> None:
        """``GetTokenizer``: a zip of the tokenizer's files in pieces, the last one with its SHA-256."""
        data, sha256 = await self._folder.zipped()
        for piece, last in in_chunks(data):
            await send(common_pb2.GetTokenizerChunk(data=piece, sha256=sha256 if last else ""))

    async def subscribe_kv_events(self, request: Any, send: Send) -> None:
        """``SubscribeKvEvents``: the blocks that are cached, then the changes, for as long as the subscriber stays."""
        if request.start_sequence_number:
            raise CacheEventsCursor("events are numbered for each subscription; subscribe again from zero")
        async with aclosing(self._report.batches()) as batches:
            async for batch in batches:
                await send(batch)


def _queued(member: Any) -> int:
    return 0 if member.pressure is None else int(member.pressure.queued_tokens)


async def _together(streams: list[TokenStream]) -> AsyncGenerator[tuple[int, list[StreamToken]], None]:
    """The tokens of several texts as they come: those that are there, with the index of their text. A text ends with an
    empty list. Raises the error of the first one that fails."""
    if len(streams) == 1:
        while tokens := await streams[0].arrived():
            yield 0, tokens
        yield 0, []
        return
    queue: asyncio.Queue[tuple[int, list[StreamToken] | BaseException]] = asyncio.Queue()

    async def read(index: int, stream: TokenStream) -> None:
        try:
            while tokens := await stream.arrived():
                queue.put_nowait((index, tokens))
            queue.put_nowait((index, []))
        except Exception as error:
            queue.put_nowait((index, error))

    readers = [asyncio.create_task(read(*each)) for each in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            index, found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            left -= not found
            yield index, found
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
