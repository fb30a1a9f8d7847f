"""A page for each file of `protos/`: services, messages and enums with their comments, each name with an anchor."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from tools.generate_stubs import PACKAGE, protoc

SERVICE, MESSAGE, ENUM, FIELD, NESTED, VALUE, METHOD, SYNTAX = 6, 4, 5, 2, 3, 2, 2, 12
"""Numbers of fields in descriptor.proto, of which the paths of comments are made."""


@cache
def files() -> dict[str, FileDescriptorProto]:
    """The descriptors by the names of their files, with comments."""
    with tempfile.NamedTemporaryFile() as out:
        protoc("--include_source_info", f"--descriptor_set_out={out.name}")
        found = FileDescriptorSet.FromString(Path(out.name).read_bytes())
    return {each.name: each for each in found.file if each.name.startswith(PACKAGE)}


class Comments:
    """The comments of a file by the path of what they describe."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._locations = {tuple(each.path): each for each in file.source_code_info.location}

    def of(self, *path: int) -> str:
        """A comment as Markdown paragraphs."""
        found = self._locations.get(path)
        return "\n".join(line.removeprefix(" ") for line in found.leading_comments.splitlines()) if found else ""

    def line(self, *path: int) -> str:
        """A comment for a cell of a table."""
        return " ".join(self.of(*path).split()).replace("|", "\\|")


@cache
def homes() -> dict[str, str]:
    """The page of each message and enum by its full name."""
    found = dict[str, str]()
    for file in files().values():
        names = [each.name for each in file.message_type] + [each.name for each in file.enum_type]
        found |= {f".{file.package}.{name}": page_of(file.name) for name in names}
    return found


def page_of(file: str) -> str:
    """The file name of the page of a proto file."""
    return f"proto-{Path(file).stem.replace('_', '-')}.md"


def pages() -> dict[str, str]:
    """The text of each page by its path on the site."""
    return {f"reference/{page_of(name)}": "\n".join(_page(file)) + "\n" for name, file in files().items()}


def field_comments(message: str) -> dict[str, str]:
    """The comments of a message's fields by their names, each on one line."""
    for file in files().values():
        for at, each in enumerate(file.message_type):
            if each.name == message:
                comments = Comments(file)
                return {
                    field.name: comments.line(MESSAGE, at, FIELD, number) for number, field in enumerate(each.field)
                }
    raise KeyError(message)


def _page(file: FileDescriptorProto) -> Iterator[str]:
    comments = Comments(file)
    yield from (f"# {Path(file.name).name}", "", f"*Generated from `protos/{file.name}`.*", "", comments.of(SYNTAX), "")
    for at, service in enumerate(file.service):
        yield from (f"## {service.name} {{ #{service.name} }}", "", comments.of(SERVICE, at), "")
        for number, method in enumerate(service.method):
            yield from (f"### {service.name}.{method.name} {{ #{service.name}.{method.name} }}", "")
            request = ("stream " if method.client_streaming else "") + _linked(method.input_type)
            response = ("stream " if method.server_streaming else "") + _linked(method.output_type)
            yield from (f"{request} → {response}", "", comments.of(SERVICE, at, METHOD, number), "")
    for at, message in enumerate(file.message_type):
        yield from _message(message, comments, (MESSAGE, at), message.name)
    for at, enum in enumerate(file.enum_type):
        yield from _enum(enum, comments, (ENUM, at), enum.name)


def _message(message: Any, comments: Comments, path: tuple[int, ...], name: str) -> Iterator[str]:
    yield from (f"## {name} {{ #{name} }}", "", comments.of(*path), "")
    if message.field:
        yield from ("| field | type | number | |", "|---|---|---:|---|")
    for at, field in enumerate(message.field):
        oneof = ""
        if field.HasField("oneof_index") and not field.proto3_optional:
            oneof = f"One of `{message.oneof_decl[field.oneof_index].name}`. "
        text = oneof + comments.line(*path, FIELD, at)
        yield f"| `{field.name}`{{ #{name}.{field.name} }} | {_type(field)} | {field.number} | {text} |"
    yield ""
    for at, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(nested, comments, (*path, NESTED, at), f"{name}.{nested.name}")
    for at, enum in enumerate(message.enum_type):
        yield from _enum(enum, comments, (*path, 4, at), f"{name}.{enum.name}")


def _enum(enum: Any, comments: Comments, path: tuple[int, ...], name: str) -> Iterator[str]:
    yield from (f"## {name} {{ #{name} }}", "", comments.of(*path), "", "| value | number | |", "|---|---:|---|")
    for at, value in enumerate(enum.value):
        yield f"| `{value.name}`{{ #{value.name} }} | {value.number} | {comments.line(*path, VALUE, at)} |"
    yield ""


def _type(field: FieldDescriptorProto) -> str:
    label = ""
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        label = "repeated "
    elif field.proto3_optional:
        label = "optional "
    if field.type_name:
        return label + _linked(field.type_name)
    return f"{label}`{FieldDescriptorProto.Type.Name(field.type).removeprefix('TYPE_').lower()}`"


def _linked(name: str) -> str:
    short = name.rpartition(".")[2]
    return f"[`{short}`]({homes()[name]}#{short})" if name in homes() else f"`{name.removeprefix('.')}`"
