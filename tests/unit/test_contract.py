"""The contract's descriptors are pinned: who changes them raises the revision."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import output_pb2
from ferrum_rpc.wire.info import SCHEMA_REVISION, SCHEMA_SHA256
from ferrum_rpc.wire.status import CODE_BY_REASON

ROOT = Path(__file__).parents[2]
CODES = {reason.value: code.name for reason, code in CODE_BY_REASON.items() if reason is not Reason.TRANSPORT}
"""What the executor sends."""

PROTOS = ("types", "output", "forward", "info", "session", "model_executor", "kv_transfer", "executor_control")
FILES = [importlib.import_module(f"ferrum_rpc.executor.v1.{name}_pb2") for name in PROTOS]
SERVICES = {
    name: {method.name for method in service.methods}
    for module in FILES
    for name, service in module.DESCRIPTOR.services_by_name.items()
}

LANDED_REVISION = 9
LANDED_SHA256 = "25f43ddf37dae0475a201817b1abcbb4617ee7a8263bc5d06f903437e2ab96f8"
"""Of `protos/landed.binpb`, the contract with which `buf breaking` compares."""


def digest_of(files: Iterable[FileDescriptor]) -> str:
    digest = hashlib.sha256()
    for each in files:
        proto = descriptor_pb2.FileDescriptorProto()
        each.CopyToProto(proto)
        messages = list(proto.message_type)
        while messages:
            message = messages.pop()
            messages += message.nested_type
            for field in message.field:
                field.ClearField("json_name")  # buf sets it, protoc does not
        digest.update(proto.SerializeToString(deterministic=True))
    return digest.hexdigest()


def test_schema_revision_is_pinned_to_the_descriptors() -> None:
    digest = digest_of(module.DESCRIPTOR for module in FILES)
    assert digest == SCHEMA_SHA256, (
        f"the contract changed: raise SCHEMA_REVISION ({SCHEMA_REVISION}), set SCHEMA_SHA256 to {digest}"
    )


def test_lint_compares_with_the_last_revision_that_landed() -> None:
    landed = descriptor_pb2.FileDescriptorSet.FromString((ROOT / "protos/landed.binpb").read_bytes())
    pool = DescriptorPool()
    for each in landed.file:
        pool.Add(each)
    digest = digest_of(pool.FindFileByName(module.DESCRIPTOR.name) for module in FILES)
    assert digest == LANDED_SHA256, f"set LANDED_REVISION, and LANDED_SHA256 to {digest}"
    assert SCHEMA_REVISION - LANDED_REVISION in (0, 1), (
        f"protos/landed.binpb is of revision {LANDED_REVISION}: write revision {SCHEMA_REVISION - 1} to it first"
    )
    assert (LANDED_SHA256 == SCHEMA_SHA256) == (LANDED_REVISION == SCHEMA_REVISION), (
        "the contract and its revision change together; protos/landed.binpb is written before protos/ are edited"
    )


def test_the_page_has_each_call_each_output_and_each_revision() -> None:
    text = (ROOT / "docs/contract.md").read_text(encoding="utf-8")

    def first_cells(heading: str) -> list[str]:
        section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        return re.findall(r"^\| `?(\w+)", section.partition("\n|---")[2].partition("\n\n")[0], re.M)

    services = dict(re.findall(r"^\| `(\w+)`[^|]*\| (.*) \|$", text.partition("## What there is")[2], re.M))
    assert {name: set(re.findall(r"`(\w+)`", services[name])) for name in services.keys() & SERVICES.keys()} == SERVICES
    kinds = {each.name for each in output_pb2.OutputSpec.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert set(first_cells("Outputs: request only what you use")) == kinds
    assert first_cells("Versions") == [str(number + 1) for number in range(SCHEMA_REVISION)]


def test_every_proto_is_pinned() -> None:
    protos = {str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto")}
    assert protos == {module.DESCRIPTOR.name for module in FILES}


def reasons_of_the_proto() -> dict[str, str]:
    """The comment at the head of the service's file: its codes, and the reasons in each line and those that go on."""
    text = (ROOT / "protos/ferrum_rpc/executor/v1/model_executor.proto").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    code = ""
    for line in re.findall(r"^//   (.*)$", text.partition("syntax =")[0], re.M):
        code = line[:20].strip() or code
        for reason in re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", re.sub(r"\([^)]*\)", "", line[20:])):
            found[reason] = code
    return found


def reasons_of_the_page() -> dict[str, str]:
    """The table of errors of docs/contract.md: a row without a code goes on with the one above."""
    text = (ROOT / "docs/contract.md").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    code = ""
    for first, reason in re.findall(r"^\| ([A-Z_]*) ?\| `([A-Z_]+)` \|", text, re.M):
        code = first or code
        found[reason] = code
    return found


@pytest.mark.parametrize("source", [reasons_of_the_proto, reasons_of_the_page])
def test_the_reasons_that_are_documented_are_those_that_are_sent(source: Callable[[], dict[str, str]]) -> None:
    assert source() == CODES
