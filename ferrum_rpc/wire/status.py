"""Conversion between errors and statuses: the only table of the error contract.

The server turns an `ExecutorError` into a ``google.rpc.Status`` with details; the client turns any status back into the
same class. No other code names a gRPC status code for an error.
"""

from __future__ import annotations

from typing import Final

import grpc
from google.rpc import error_details_pb2, status_pb2

from ferrum_rpc.errors import (
    ERROR_BY_REASON,
    DeadlineExceeded,
    ExecutorError,
    InvalidRequest,
    NotSupported,
    OutputTooLarge,
    PermissionDenied,
    Reason,
    TransportError,
    Unauthenticated,
)

DOMAIN: Final = "ferrum_rpc"
STATUS_METADATA_KEY: Final = "grpc-status-details-bin"

CODE_BY_REASON: Final[dict[Reason, grpc.StatusCode]] = {
    Reason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.REQUEST_ID_REUSED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.HANDLE_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.HANDLE_RELEASED: grpc.StatusCode.NOT_FOUND,
    Reason.LEASE_EXPIRED: grpc.StatusCode.NOT_FOUND,
    Reason.LEASE_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.TOKEN_MASK_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.GRAMMAR_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.ADAPTER_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.ADAPTER_IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.INSTANCE_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LAYOUT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SEQUENCE_VERSION_MISMATCH: grpc.StatusCode.ABORTED,
    Reason.SEQUENCE_BUSY: grpc.StatusCode.ABORTED,
    Reason.CHAIN_BROKEN: grpc.StatusCode.ABORTED,
    Reason.CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.OUT_OF_RANGE,
    Reason.TRUNCATE_BEYOND_LENGTH: grpc.StatusCode.OUT_OF_RANGE,
    Reason.KV_BLOCKS_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.KV_CORRUPT: grpc.StatusCode.DATA_LOSS,
    Reason.SEQUENCES_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.OUTPUT_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.GRAMMAR_TOO_COMPLEX: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.STARTING: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.NOT_SUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.DEVICE_LOST: grpc.StatusCode.INTERNAL,
    Reason.STEP_FAILED: grpc.StatusCode.INTERNAL,
    Reason.INTERNAL_ERROR: grpc.StatusCode.INTERNAL,
    # TRANSPORT is what a client says of a connection without an answer; a server never sends it.
    Reason.TRANSPORT: grpc.StatusCode.UNAVAILABLE,
}

_BARE_STATUS: Final[dict[grpc.StatusCode, type[ExecutorError]]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNIMPLEMENTED: NotSupported,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OutputTooLarge,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}
"""The meaning of a status without ErrorInfo: gRPC itself answered, not the executor. Its only RESOURCE_EXHAUSTED is a
message above the limit: an answer, or a request if the receiving side says so."""

_REQUEST_TOO_LARGE: Final = "SERVER: Received message larger than max"


def code_number(code: grpc.StatusCode) -> int:
    """The canonical number of a gRPC status code."""
    number: int = code.value[0]
    return number


def status_from_error(error: ExecutorError) -> status_pb2.Status:
    """The ``google.rpc.Status`` of a refusal: always with ErrorInfo, and with RetryInfo, BadRequest, ResourceInfo if
    they help."""
    status = status_pb2.Status(code=code_number(CODE_BY_REASON[error.reason]), message=error.message)
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(retry)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.reason is Reason.KV_BLOCKS_EXHAUSTED:
        kind = "kv_slot" if "needed_slots" in error.metadata else "kv_block"
        resource = error_details_pb2.ResourceInfo(resource_type=kind, description=error.message)
        details.append(resource)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def error_from_status(status: status_pb2.Status) -> ExecutorError:
    """The typed error that a ``google.rpc.Status`` stands for. A reason of a newer server becomes an `InvalidRequest`,
    `TransportError`, … by its code, with the reason in ``metadata["reason"]``."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    retry_after: float | None = None
    field: str | None = None
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            retry_after = retry.retry_delay.ToMilliseconds() / 1000
        elif detail.Is(bad.DESCRIPTOR) and detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
    metadata = dict(info.metadata)
    try:
        cls = ERROR_BY_REASON[Reason(info.reason)]
    except ValueError:
        codes = {code_number(code): code for code in grpc.StatusCode}
        cls = _BARE_STATUS.get(codes.get(status.code, grpc.StatusCode.UNKNOWN), TransportError)
        if info.reason:
            metadata["reason"] = info.reason
    return cls(status.message, metadata=metadata, retry_after_s=retry_after, field=field)


def error_from_rpc(error: grpc.aio.AioRpcError) -> ExecutorError:
    """The typed error of a failed call. Without the executor's own details it is gRPC's: the deadline passed, or the
    connection failed (`TransportError`: the outcome is unknown)."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_METADATA_KEY:
            status = status_pb2.Status()
            status.ParseFromString(value if isinstance(value, bytes) else value.encode())
            return error_from_status(status)
    if error.code() is grpc.StatusCode.CANCELLED:
        # grpc.aio raises a caller's own cancellation otherwise: this one is the peer's, which reset the stream.
        return TransportError("the peer reset the call", metadata={"grpc_code": grpc.StatusCode.UNAVAILABLE.name})
    message = error.details() or error.code().name
    metadata = {"grpc_code": error.code().name}
    if message.startswith(_REQUEST_TOO_LARGE):
        return InvalidRequest(message, field="request", metadata=metadata)
    return _BARE_STATUS.get(error.code(), TransportError)(message, metadata=metadata)
