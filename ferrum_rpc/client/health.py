"""The standard health check, without the grpcio-health-checking package.

The two messages of ``grpc.health.v1`` are described here in a pool of their own, so that a program that also has the
official package never meets a second registration of the same names.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

CHECK: Final = "/grpc.health.v1.Health/Check"


class Health(enum.Enum):
    """``grpc.health.v1.HealthCheckResponse.ServingStatus``."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


def _messages() -> tuple[Any, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="health.proto", package="grpc.health.v1", syntax="proto3")
    file.message_type.add(name="Request").field.add(
        name="service", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL
    )
    file.message_type.add(name="Response").field.add(
        name="status", number=1, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    request, response = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"grpc.health.v1.{name}"))
        for name in ("Request", "Response")
    )
    return request, response


_Request, _Response = _messages()


def request(service: str) -> Any:
    """The request for a service's health; the empty name means the whole server."""
    return _Request(service=service)


def checker(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[Any, Any]:
    """The ``Check`` method on a channel. Its answer's ``status`` is a `Health` value."""
    return channel.unary_unary(
        CHECK, request_serializer=_Request.SerializeToString, response_deserializer=_Response.FromString
    )


def health(status: int) -> Health:
    """The enum of a number; what is not known yet is UNKNOWN."""
    try:
        return Health(status)
    except ValueError:
        return Health.UNKNOWN
