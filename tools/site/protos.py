"""A page for each file of `protos/`: services, messages and enums with their comments, each name with an anchor."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from tools.generate_stubs import PACKAGE, protoc
from tools.site.reference import rendered

MESSAGE, FIELD = 4, 2
"""Numbers of fields in descriptor.proto, of which the paths of comments are made, here and in the template."""


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

    def of(self, path: tuple[int, ...]) -> str:
        """A comment as Markdown paragraphs."""
        found = self._locations.get(path)
        return "\n".join(line.removeprefix(" ") for line in found.leading_comments.splitlines()) if found else ""

    def line(self, path: tuple[int, ...]) -> str:
        """A comment for a cell of a table."""
        return " ".join(self.of(path).split()).replace("|", "\\|")


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
    return {f"reference/{page_of(name)}": _page(file) for name, file in files().items()}


def field_comments(message: str) -> dict[str, str]:
    """The comments of a message's fields by their names, each on one line."""
    for file in files().values():
        for at, each in enumerate(file.message_type):
            if each.name == message:
                comments = Comments(file)
                return {
                    field.name: comments.line((MESSAGE, at, FIELD, number)) for number, field in enumerate(each.field)
                }
    raise KeyError(message)


def _page(file: FileDescriptorProto) -> str:
    def scalar(field: FieldDescriptorProto) -> str:
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    return rendered("proto", file=file, comments=Comments(file), homes=homes(), scalar=scalar)
