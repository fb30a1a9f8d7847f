"""What an executor is, as messages; and which revision of the contract this code speaks. A test pins the hash of the
descriptors to its number."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from google.protobuf import duration_pb2, message

from ferrum_rpc.core import DeviceInfo, Limits, ModelInfo
from ferrum_rpc.executor.v1 import info_pb2

M = TypeVar("M", bound=message.Message)
Data = TypeVar("Data")

SCHEMA_REVISION = 3
"""Grows with every change of protos/."""

MINIMUM_CLIENT_REVISION = 1
"""GetInfo says it; clients that were built for an older one end there."""

SCHEMA_SHA256 = "2c0ade4935dc314da38770ec287d05236f6cc94283636c2ba60c2db64f002942"
"""SHA-256 over the serialized file descriptors, in the order of the test that checks it."""

CAPABILITIES: Final[tuple[info_pb2.Capability, ...]] = (
    info_pb2.CAPABILITY_OUTPUT_GREEDY,
    info_pb2.CAPABILITY_OUTPUT_TOP_TOKENS,
    info_pb2.CAPABILITY_OUTPUT_SELECTED_TOKENS,
    info_pb2.CAPABILITY_OUTPUT_FULL_LOGITS,
    info_pb2.CAPABILITY_UNIFIED_FORWARD,
    info_pb2.CAPABILITY_TRUNCATE,
    info_pb2.CAPABILITY_FORK,
    info_pb2.CAPABILITY_RESERVE,
    info_pb2.CAPABILITY_REPLAY,
    info_pb2.CAPABILITY_LEASES,
    info_pb2.CAPABILITY_SESSION,
    info_pb2.CAPABILITY_WARMUP,
    info_pb2.CAPABILITY_RESET,
    info_pb2.CAPABILITY_DRAIN,
    info_pb2.CAPABILITY_LIST_SEQUENCES,
)
"""What this version offers. What is not here answers UNIMPLEMENTED with NOT_SUPPORTED."""


def _message(message: type[M], *sources: object, **fields: Any) -> M:
    """A message whose fields are what the sources' attributes of the same names are, besides those that are given."""
    for source in sources:
        names = [name for name in message.DESCRIPTOR.fields_by_name if name not in fields and hasattr(source, name)]
        fields |= {name: getattr(source, name) for name in names}
    return message(**fields)


def model_to_proto(model: ModelInfo) -> info_pb2.ModelInfo:
    """Domain to wire."""
    return _message(info_pb2.ModelInfo, model)


def limits_to_proto(limits: Limits, device: DeviceInfo) -> info_pb2.Limits:
    """Domain to wire."""
    message = _message(info_pb2.Limits, limits, exact_span_tokens=device.exact_span_tokens)
    for name in ("lease_ttl", "min_lease_ttl", "max_lease_ttl", "idle_ttl"):
        set_seconds(getattr(message, name), getattr(limits, f"{name}_s"))
    return message


def device_to_proto(device: DeviceInfo) -> info_pb2.DeviceInfo:
    """Domain to wire."""
    choices = [info_pb2.DeviceChoice(choice=choice, reason=reason) for choice, reason in device.choices]
    return _message(info_pb2.DeviceInfo, device, choices=choices)


def counters_to_proto(*sources: object, forward_s: float, replays: int) -> info_pb2.Counters:
    """Domain to wire, by the names of the fields; ``forward_s``: seconds in forward passes."""
    message = _message(info_pb2.Counters, *sources, replays=replays)
    set_seconds(message.forward_time, forward_s)
    return message


def from_proto(into: type[Data], proto: Any, **given: Any) -> Data:
    """The dataclass of a message, from the fields of the same names that are not ``given``; a duration's ends in
    ``_s``."""
    for name in into.__dataclass_fields__:  # type: ignore[attr-defined]
        if name not in given:
            given[name] = seconds(getattr(proto, name[:-2])) if name.endswith("_s") else getattr(proto, name)
    return into(**given)


def seconds(duration: duration_pb2.Duration) -> float:
    """A time span's seconds, whatever a client wrote into it."""
    return float(duration.seconds + duration.nanos / 1e9)


def set_seconds(duration: duration_pb2.Duration, value: float) -> None:
    """Write a time span into its message."""
    duration.FromNanoseconds(round(value * 1e9))
