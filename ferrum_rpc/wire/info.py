"""What an executor is, as messages; and which revision of the contract this code speaks. A test pins the hash of the
descriptors to its number."""

from __future__ import annotations

from typing import Final

from google.protobuf import duration_pb2

from ferrum_rpc.core import DeviceInfo, Limits, ModelInfo
from ferrum_rpc.executor.v1 import info_pb2

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


def model_to_proto(model: ModelInfo) -> info_pb2.ModelInfo:
    """Domain to wire."""
    return info_pb2.ModelInfo(
        name=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        layers=model.layers,
        hidden_size=model.hidden_size,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        parameters=model.parameters,
        weight_dtype=model.weight_dtype,
        kv_dtype=model.kv_dtype,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
        folder=model.folder,
    )


def limits_to_proto(limits: Limits, device: DeviceInfo) -> info_pb2.Limits:
    """Domain to wire."""
    message = info_pb2.Limits(
        max_batch_items=limits.max_batch_items,
        max_batch_tokens=limits.max_batch_tokens,
        max_top_tokens=limits.max_top_tokens,
        max_selected_tokens=limits.max_selected_tokens,
        max_request_bytes=limits.max_request_bytes,
        max_response_bytes=limits.max_response_bytes,
        max_sequences=limits.max_sequences,
        max_queued_items=limits.max_queued_items,
        max_queued_tokens=limits.max_queued_tokens,
        replay_bytes=limits.replay_bytes,
        max_steps_in_flight=limits.max_steps_in_flight,
        session_inline_bytes=limits.session_inline_bytes,
        max_session_response_bytes=limits.max_session_response_bytes,
        max_sequences_per_caller=limits.max_sequences_per_caller,
        max_blocks_per_caller=limits.max_blocks_per_caller,
        max_leases=limits.max_leases,
        max_sessions=limits.max_sessions,
        caller_share=limits.caller_share,
        exact_span_tokens=device.exact_span_tokens,
        max_unread_bytes=limits.max_unread_bytes,
    )
    set_seconds(message.lease_ttl, limits.lease_ttl_s)
    set_seconds(message.min_lease_ttl, limits.min_lease_ttl_s)
    set_seconds(message.max_lease_ttl, limits.max_lease_ttl_s)
    set_seconds(message.idle_ttl, limits.idle_ttl_s)
    return message


def seconds(duration: duration_pb2.Duration) -> float:
    """A time span's seconds, whatever a client wrote into it."""
    return float(duration.seconds + duration.nanos / 1e9)


def set_seconds(duration: duration_pb2.Duration, value: float) -> None:
    """Write a time span into its message."""
    duration.FromNanoseconds(round(value * 1e9))


def device_to_proto(device: DeviceInfo) -> info_pb2.DeviceInfo:
    """Domain to wire."""
    return info_pb2.DeviceInfo(
        kind=device.kind,
        name=device.name,
        memory_bytes=device.memory_bytes,
        threads=device.threads,
        attention_backend=device.attention_backend,
        choices=[info_pb2.DeviceChoice(choice=choice, reason=reason) for choice, reason in device.choices],
    )
