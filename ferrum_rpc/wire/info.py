"""What an executor is, as messages; and which revision of the contract this code speaks. A test pins the hash of the
descriptors to its number."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from google.protobuf import duration_pb2, message

from ferrum_rpc.core import DeviceInfo
from ferrum_rpc.executor.v1 import info_pb2

M = TypeVar("M", bound=message.Message)
Data = TypeVar("Data")

SCHEMA_REVISION = 10
"""Increases with every change of protos/."""

MINIMUM_CLIENT_REVISION = 1
"""The oldest supported client revision, reported by GetInfo."""

LIVENESS: Final = "liveness"
"""The service name of the standard health check for liveness: SERVING while process and device are healthy, also while
the executor loads or drains. Older executors answer NOT_FOUND."""

SCHEMA_SHA256 = "1aa1248e11ec95efabecf8e98147844271ba9da9a8099e9e2fad828b2e9c39fa"
"""SHA-256 over the serialized file descriptors, in the order of the test that checks it."""

CAPABILITIES: Final[tuple[info_pb2.Capability, ...]] = (
    info_pb2.CAPABILITY_OUTPUT_GREEDY,
    info_pb2.CAPABILITY_OUTPUT_SAMPLE,
    info_pb2.CAPABILITY_OUTPUT_TOP_TOKENS,
    info_pb2.CAPABILITY_OUTPUT_SELECTED_TOKENS,
    info_pb2.CAPABILITY_OUTPUT_FULL_LOGITS,
    info_pb2.CAPABILITY_OUTPUT_ACCEPT,
    info_pb2.CAPABILITY_OUTPUT_HIDDEN_STATES,
    info_pb2.CAPABILITY_UNIFIED_FORWARD,
    info_pb2.CAPABILITY_TRUNCATE,
    info_pb2.CAPABILITY_FORK,
    info_pb2.CAPABILITY_RESERVE,
    info_pb2.CAPABILITY_REPLAY,
    info_pb2.CAPABILITY_LEASES,
    info_pb2.CAPABILITY_SESSION,
    info_pb2.CAPABILITY_TOKEN_MASKS,
    info_pb2.CAPABILITY_PREFIX_CACHE,
    info_pb2.CAPABILITY_KV_TRANSFER,
    info_pb2.CAPABILITY_KV_EVENTS,
    info_pb2.CAPABILITY_WARMUP,
    info_pb2.CAPABILITY_RESET,
    info_pb2.CAPABILITY_DRAIN,
    info_pb2.CAPABILITY_LIST_SEQUENCES,
    info_pb2.CAPABILITY_PENALTIES,
    info_pb2.CAPABILITY_OUTPUT_NEXT_TOKEN,
    info_pb2.CAPABILITY_ROW_LOGPROBS,
    info_pb2.CAPABILITY_RUN,
    info_pb2.CAPABILITY_FOLLOW,
    info_pb2.CAPABILITY_STEP_FORK,
    info_pb2.CAPABILITY_STEP_FRAMES,
)
"""The capabilities of every executor of this version; `ServerState.capabilities` has the optional ones. A missing one
answers UNIMPLEMENTED with NOT_SUPPORTED."""


def to_proto(into: type[M], *sources: object, **given: Any) -> M:
    """The message whose fields are the sources' attributes of the same names, where they are not ``given``; that of a
    duration ends in ``_s``."""
    for source in sources:
        for name in into.DESCRIPTOR.fields_by_name.keys() - given.keys():
            if hasattr(source, name):
                given[name] = getattr(source, name)
            elif hasattr(source, f"{name}_s"):
                given[name] = duration(getattr(source, f"{name}_s"))
    return into(**given)


def device_to_proto(device: DeviceInfo) -> info_pb2.DeviceInfo:
    """Domain to wire."""
    choices = [info_pb2.DeviceChoice(choice=choice, reason=reason) for choice, reason in device.choices]
    return to_proto(info_pb2.DeviceInfo, device, choices=choices)


def from_proto(into: type[Data], proto: Any, **given: Any) -> Data:
    """The dataclass of a message, from the fields of the same names that are not ``given``; a duration's ends in
    ``_s``."""
    for name in into.__dataclass_fields__:  # type: ignore[attr-defined]
        if name not in given:
            given[name] = seconds(getattr(proto, name[:-2])) if name.endswith("_s") else getattr(proto, name)
    return into(**given)


def seconds(span: duration_pb2.Duration) -> float:
    """A duration in seconds, whatever a client wrote into it."""
    return float(span.seconds + span.nanos / 1e9)


def duration(value: float) -> duration_pb2.Duration:
    """A duration of so many seconds."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(value * 1e9))
    return message
