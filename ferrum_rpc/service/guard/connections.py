"""The options of a gRPC server: what a connection may hold, and when a dead one is closed."""

from __future__ import annotations

from typing import Any, Final

PENDING_CALLS: Final = 2560
UNREAD_BYTES: Final = 16 << 10
"""Calls that may wait to be accepted, of all connections, and what each may have sent by then, before any credentials
are checked. 2,560 of them with their bytes took 54 MiB. A longer message takes one more round trip; a step of 150
sequences is shorter."""


def connection_options(
    *,
    max_request_bytes: int,
    max_response_bytes: int,
    max_streams: int,
    keepalive_time_s: float,
    keepalive_timeout_s: float,
) -> list[tuple[str, Any]]:
    """The options. ``max_streams``: open streams of a connection. ``max_response_bytes``: -1 is no limit. A client that
    sends nothing for ``keepalive_time_s`` is pinged, and disconnected if it does not answer within
    ``keepalive_timeout_s``."""
    keepalive_timeout_ms = round(keepalive_timeout_s * 1e3)
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_send_message_length", max_response_bytes),
        ("grpc.keepalive_time_ms", round(keepalive_time_s * 1e3)),
        ("grpc.keepalive_timeout_ms", keepalive_timeout_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_timeout_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # gRPC closes a connection at the third ping less than 5 s after another; our client pings every 10 s.
        ("grpc.http2.max_ping_strikes", 2),
        # A token and trace ids take hundreds of bytes. Above the soft limit a call may be refused, above the hard one
        # always.
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.absolute_max_metadata_size", 32 << 10),
        # A silent connection holds a descriptor: gRPC would wait two minutes for its handshake.
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_concurrent_streams", max_streams),
        # Of the calls that wait to be accepted, gRPC resets some beyond 1,000 and all beyond 3,000. A scheduler's 2,000
        # sessions are not an attack.
        ("grpc.server.max_pending_requests", PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS),
        # The flow-control window; gRPC's default is 64 KiB, megabytes on a fast connection. A longer message costs a
        # round trip, because gRPC requests the rest when it is read.
        ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
    ]
