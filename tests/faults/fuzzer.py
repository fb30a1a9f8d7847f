"""Requests of any method: random bytes, and messages of values that mean something or nearly, whole and damaged."""

from __future__ import annotations

import random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ferrum_rpc.executor.v1 import session_pb2, types_pb2

HELLO: Final = session_pb2.SessionRequest(hello=session_pb2.SessionHello()).SerializeToString()


class Fuzzer:
    """Makes requests of a method: bytes, and messages of bytes and numbers that mean something or nearly."""

    def __init__(self, dice: random.Random, handles: list[types_pb2.KvHandle]) -> None:
        self._dice = dice
        self.handles = handles
        self._valid: dict[str, list[bytes]] = {}

    def request(self, method: MethodDescriptor) -> bytes:
        """The next request; half of them are messages, the rest are not or may not be."""
        dice = self._dice
        match dice.randrange(8):
            case 0:
                return dice.randbytes(dice.choice((0, 1, 2, 7, 30, 300)))
            case 1 | 2 | 3:
                return self._damaged(self._message(method).SerializeToString())
            case _:
                return self._message(method).SerializeToString()

    def requests(self, method: MethodDescriptor) -> list[bytes]:
        """The requests of a call: one, or several where the method takes a stream. A session begins as it should, most
        of the time."""
        if not method.client_streaming:
            return [self.request(method)]
        rest = [self.request(method) for _ in range(self._dice.randint(0, 4))]
        return [HELLO, *rest] if method.name == "Session" and self._dice.random() < 0.9 else rest

    def _message(self, method: MethodDescriptor) -> Message:
        message: Message = GetMessageClass(method.input_type)()
        self._fill(message, 0)
        return message

    def _damaged(self, data: bytes) -> bytes:
        dice, data_ = self._dice, bytearray(data)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(data_) + 1)
            match dice.randrange(5):
                case 0 if data_:
                    data_[at - 1] ^= 1 << dice.randrange(8)
                case 1:
                    data_[at:at] = dice.randbytes(dice.randint(1, 5))
                case 2:
                    del data_[at : at + dice.randint(1, 9)]
                case 3:
                    data_[at:] = b""
                case _:
                    data_ += data_[at:]
        return bytes(data_[: 1 << 14])

    def _fill(self, message: Message, depth: int) -> None:
        dice = self._dice
        if isinstance(message, types_pb2.KvHandle) and self.handles and dice.random() < 0.8:
            message.CopyFrom(dice.choice(self.handles))
            return
        taken = {dice.choice(each.fields).name for each in message.DESCRIPTOR.oneofs}
        for each in message.DESCRIPTOR.fields:
            if each.containing_oneof is not None and each.name not in taken:
                continue
            if dice.random() < 0.25 + 0.1 * depth:
                continue
            if each.is_repeated:
                values = getattr(message, each.name)
                for _ in range(dice.choice((0, 1, 1, 2, 3))):
                    if each.message_type is None:
                        values.append(self._value(each))
                    elif depth < 5 and hasattr(values, "add"):
                        self._fill(values.add(), depth + 1)
            elif each.message_type is not None:
                if depth < 5:
                    getattr(message, each.name).SetInParent()
                    self._fill(getattr(message, each.name), depth + 1)
            else:
                setattr(message, each.name, self._value(each))

    def _value(self, each: FieldDescriptor) -> Any:
        dice = self._dice
        kinds = FieldDescriptor
        match each.cpp_type:
            case kinds.CPPTYPE_BOOL:
                return dice.random() < 0.5
            case kinds.CPPTYPE_STRING:
                if each.type == kinds.TYPE_BYTES:
                    return dice.randbytes(dice.choice((0, 1, 8, 24, 32)))
                return dice.choice(("", "a", "b", "demo", "../..", "\0", "ä" * 100, "x" * 129))
            case kinds.CPPTYPE_FLOAT | kinds.CPPTYPE_DOUBLE:
                return dice.choice((0.0, -1.0, 0.5, 1e30, float("inf"), float("nan")))
            case kinds.CPPTYPE_ENUM:
                return dice.choice((*(value.number for value in each.enum_type.values), 77))
            case kinds.CPPTYPE_INT64:
                return dice.choice((0, 1, -1, 5, 2**40, 2**63 - 1, -(2**63)))
            case kinds.CPPTYPE_INT32:
                return dice.choice((0, 1, -1, 999_999_999, 2**31 - 1, -(2**31)))
            case kinds.CPPTYPE_UINT64:
                return dice.choice((0, 1, 2, 3, 2**64 - 1))
        return dice.choice((0, 1, 2, 3, 5, 8, 255, 256, 2**16, 2**31, 2**32 - 1))
