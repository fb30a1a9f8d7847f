"""The contract's descriptors are pinned: who changes them raises the revision."""

from __future__ import annotations

import hashlib

from google.protobuf import descriptor_pb2

from ferrum_rpc.executor.v1 import (
    executor_control_pb2,
    forward_pb2,
    info_pb2,
    kv_transfer_pb2,
    model_executor_pb2,
    output_pb2,
    session_pb2,
    types_pb2,
)
from ferrum_rpc.wire.info import SCHEMA_REVISION, SCHEMA_SHA256

FILES = (
    types_pb2,
    output_pb2,
    forward_pb2,
    info_pb2,
    session_pb2,
    model_executor_pb2,
    kv_transfer_pb2,
    executor_control_pb2,
)


def test_schema_revision_is_pinned_to_the_descriptors() -> None:
    digest = hashlib.sha256()
    for module in FILES:
        proto = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(proto)
        digest.update(proto.SerializeToString(deterministic=True))
    assert digest.hexdigest() == SCHEMA_SHA256, (
        f"the contract changed: raise SCHEMA_REVISION ({SCHEMA_REVISION}), set SCHEMA_SHA256 to {digest.hexdigest()}"
    )


def test_every_rpc_has_its_own_request_and_response() -> None:
    seen: set[str] = set()
    for module in FILES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                for message in (method.input_type, method.output_type):
                    assert message.full_name not in seen
                    seen.add(message.full_name)
                assert method.input_type.name == f"{method.name}Request"
                assert method.output_type.name == f"{method.name}Response"
    assert len(seen) == 2 * (17 + 4 + 7)
