"""The client of ferrum-rpc: what a scheduler imports. Needs grpcio with its health checking, protobuf and
numpy; loads no torch, no server code.

    import asyncio
    from ferrum_rpc.client import ExecutorClient, TopTokens

    async def main() -> None:
        async with ExecutorClient("localhost:50051") as client:
            info = await client.info()
            print(info.model.name, info.model.vocab_size, info.limits.max_batch_tokens)
            async with client.sequence() as sequence:          # released at the end of the block, also on errors
                answer = await sequence.prefill(b"In the beginning")
                text = [answer.token]                           # greedy: the arg-max of the last row
                while len(text) < 32:
                    answer = await sequence.decode(text[-1])
                    text.append(answer.token)
                print(bytes(token for token in text if token < 256))

                [branch] = await sequence.fork()                # shares the cache until it diverges
                async with branch:
                    results = await client.forward(             # both in one forward pass
                        [sequence.item([text[-1]]), branch.item([32], TopTokens(4))]
                    )
                    [first, second] = results.all_answers()     # raises what refused one of them
                    print(second.top_tokens.token_ids, client.pressure)

                async for token in sequence.generate([first.token], max_tokens=8):  # a stream
                    print(token)
                await client.release([sequence, branch])        # many in one call, an outcome for each
            print((await client.score(b"In the beginning", first=2)).logprobs)  # of each token behind "In"

    asyncio.run(main())

Sequences are in the executor's cache: `Sequence` has the handle and updates it with every answer. Errors are the
classes of `ferrum_rpc.errors`, which this module exports too, also as tuples by what you do about them (`NO_CAPACITY`,
`TRY_LATER`, `SEQUENCE_GONE`, `NO_ANSWER`, `OUT_OF_STEP`, `CALLER_ERROR`); single calls raise them and batches return
them per item (`BatchResults`). Requested rows are numpy arrays of `Answer`. A lost reply never appends twice: every
mutating call has a request id, and calls with an unknown outcome are sent again under the same id (`ResendPolicy`). A
client's sequences live with its lease, which it renews by itself (`LeasePolicy`); with ``session=True`` its requests
share one stream. `client.sync` is the same for programs without asyncio, `client.fleet` for several executors, and
`client.fleet.sync` for both.
"""

from ferrum_rpc.client.answer import Answer, BatchResults, NoSuchRowsError
from ferrum_rpc.client.arguments import CacheMode
from ferrum_rpc.client.channel import ChannelCredentials, read_token, tls
from ferrum_rpc.client.client import ExecutorClient
from ferrum_rpc.client.encryption import explained
from ferrum_rpc.client.executor_view import ExecutorView
from ferrum_rpc.client.info import (
    Activity,
    AdapterInfo,
    CallerActivity,
    Capability,
    Counters,
    ExecutorInfo,
    ExecutorState,
    ExecutorStatus,
    Health,
    KvBlocks,
    MethodCount,
    SequenceInfo,
    SlowCall,
    WarmupReport,
)
from ferrum_rpc.client.lease import Lease, LeasePolicy, LeaseState, LeaseTrouble
from ferrum_rpc.client.model_client import ModelClient
from ferrum_rpc.client.pace import RunPace
from ferrum_rpc.client.pieces import Pieces
from ferrum_rpc.client.prefixes import PrefixEvents, PrefixIndex
from ferrum_rpc.client.retry import (
    CALLER_ERROR,
    NEVER_RESEND,
    NO_ANSWER,
    NO_CAPACITY,
    OUT_OF_STEP,
    SEQUENCE_GONE,
    TRY_LATER,
    ResendPolicy,
)
from ferrum_rpc.client.runs import FinishReason, StreamToken, forbidding, stream_tokens
from ferrum_rpc.client.sequence import Sequence
from ferrum_rpc.client.state import Item, SequenceMisuseError
from ferrum_rpc.core import (
    Accept,
    FullLogits,
    GrammarKind,
    Greedy,
    HandleRef,
    HiddenStates,
    NextToken,
    OutputSpec,
    Positions,
    Pressure,
    RowDType,
    RowLogprobs,
    Run,
    RunEnd,
    Sample,
    SelectedTokens,
    StepTiming,
    TopTokens,
)
from ferrum_rpc.errors import (
    AdapterInUse,
    AdapterUnknown,
    Cancelled,
    ChainBroken,
    ContextLengthExceeded,
    DeadlineExceeded,
    DeviceLost,
    Draining,
    ExecutorError,
    GrammarTooComplex,
    GrammarUnknown,
    HandleReleased,
    HandleUnknown,
    InstanceMismatch,
    InternalError,
    InvalidRequest,
    KvBlocksExhausted,
    KvCorrupt,
    LayoutMismatch,
    LeaseExpired,
    LeaseUnknown,
    NotSupported,
    OutputTooLarge,
    PermissionDenied,
    QueueFull,
    QuotaExceeded,
    Reason,
    RequestIdReused,
    SequenceBusy,
    SequencesExhausted,
    SequenceVersionMismatch,
    Starting,
    StepFailed,
    TokenMaskUnknown,
    TransportError,
    TruncateBeyondLength,
    Unauthenticated,
)
from ferrum_rpc.wire.info import LIVENESS

__all__ = [
    "CALLER_ERROR",
    "LIVENESS",
    "NEVER_RESEND",
    "NO_ANSWER",
    "NO_CAPACITY",
    "OUT_OF_STEP",
    "SEQUENCE_GONE",
    "TRY_LATER",
    "Accept",
    "Activity",
    "AdapterInUse",
    "AdapterInfo",
    "AdapterUnknown",
    "Answer",
    "BatchResults",
    "CacheMode",
    "CallerActivity",
    "Cancelled",
    "Capability",
    "ChainBroken",
    "ChannelCredentials",
    "ContextLengthExceeded",
    "Counters",
    "DeadlineExceeded",
    "DeviceLost",
    "Draining",
    "ExecutorClient",
    "ExecutorError",
    "ExecutorInfo",
    "ExecutorState",
    "ExecutorStatus",
    "ExecutorView",
    "FinishReason",
    "FullLogits",
    "GrammarKind",
    "GrammarTooComplex",
    "GrammarUnknown",
    "Greedy",
    "HandleRef",
    "HandleReleased",
    "HandleUnknown",
    "Health",
    "HiddenStates",
    "InstanceMismatch",
    "InternalError",
    "InvalidRequest",
    "Item",
    "KvBlocks",
    "KvBlocksExhausted",
    "KvCorrupt",
    "LayoutMismatch",
    "Lease",
    "LeaseExpired",
    "LeasePolicy",
    "LeaseState",
    "LeaseTrouble",
    "LeaseUnknown",
    "MethodCount",
    "ModelClient",
    "NextToken",
    "NoSuchRowsError",
    "NotSupported",
    "OutputSpec",
    "OutputTooLarge",
    "PermissionDenied",
    "Pieces",
    "Positions",
    "PrefixEvents",
    "PrefixIndex",
    "Pressure",
    "QueueFull",
    "QuotaExceeded",
    "Reason",
    "RequestIdReused",
    "ResendPolicy",
    "RowDType",
    "RowLogprobs",
    "Run",
    "RunEnd",
    "RunPace",
    "Sample",
    "SelectedTokens",
    "Sequence",
    "SequenceBusy",
    "SequenceInfo",
    "SequenceMisuseError",
    "SequenceVersionMismatch",
    "SequencesExhausted",
    "SlowCall",
    "Starting",
    "StepFailed",
    "StepTiming",
    "StreamToken",
    "TokenMaskUnknown",
    "TopTokens",
    "TransportError",
    "TruncateBeyondLength",
    "Unauthenticated",
    "WarmupReport",
    "explained",
    "forbidding",
    "read_token",
    "stream_tokens",
    "tls",
]
