"""Typed reading of an untrusted configuration.

``config.json`` comes from the internet: every field is checked where it is read, and the error names the field. The
names that were read are kept, so that the rest can be refused. What fields mean is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from ferrum_rpc.errors import InvalidRequest

T = TypeVar("T")

LARGEST: Final = 2**31 - 1
"""No integer of a configuration is larger."""

MAX_EXPERTS: Final = 4096
"""Of a layer: more is a broken file."""

WIDEST: Final = 1e30
"""No number is farther from 1, in either direction: nothing computed from a few of them overflows float64."""


class _Required:
    """Marks a field without a default."""


REQUIRED: Final = _Required()


class Fields:
    """The fields of one JSON object. ``null`` counts as absent. ``path`` names the object in errors."""

    def __init__(self, data: Mapping[str, object], path: str = "") -> None:
        self._data = data
        self._path = path
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def name(self, field: str) -> str:
        """The field's full name, as errors show it."""
        return f"{self._path}.{field}" if self._path else field

    def value(self, field: str) -> object:
        """The raw value, or None."""
        self._read.add(field)
        return self._data.get(field)

    def unread(self) -> dict[str, object]:
        """The fields that were not read yet and are not null."""
        return {field: value for field, value in self._data.items() if field not in self._read and value is not None}

    def integer(self, field: str, default: int | _Required = REQUIRED, *, low: int = 1, high: int = LARGEST) -> int:
        """A whole number within ``low .. high``."""
        value = self.value(field)
        if value is None:
            return self._default(field, default, "an integer")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(field, "an integer", value)
        if not low <= value <= high:
            raise self._wrong(field, f"within {low} .. {high}", value)
        return value

    def number(self, field: str, default: float | _Required = REQUIRED, *, positive: bool = True) -> float:
        """A finite number, greater than 0 unless ``positive`` is off."""
        value = self.value(field)
        if value is None:
            return float(self._default(field, default, "a number"))
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(field, "a number", value)
        if not -WIDEST <= value <= WIDEST or (positive and value < 1 / WIDEST):  # NaN compares false
            raise self._wrong(field, "a finite number greater than 0" if positive else "a finite number", value)
        return float(value)

    def optional_number(self, field: str, default: float | None = None, *, positive: bool = True) -> float | None:
        """Like `number`, or None where the field is null; ``default`` where it is not there at all."""
        if field not in self:
            return default
        return None if self.value(field) is None else self.number(field, positive=positive)

    def numbers(self, field: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` finite numbers greater than 0."""
        values = self.value(field)
        if not isinstance(values, list) or len(values) != count:
            raise self._wrong(field, f"a list of {count} numbers", values)
        items = Fields({f"{field}[{index}]": value for index, value in enumerate(values)}, self._path)
        return tuple([items.number(f"{field}[{index}]") for index in range(count)])

    def integers(self, field: str) -> tuple[int, ...] | None:
        """A list of whole numbers, or None where the field is absent."""
        values = self.value(field)
        if values is None:
            return None
        if not isinstance(values, list) or not all(type(each) in {int, bool} for each in values):
            raise self._wrong(field, "a list of whole numbers", values)
        return tuple(values)

    def flag(self, field: str, default: bool | _Required = REQUIRED) -> bool:
        """True or false."""
        return self._of(bool, field, default, "true or false")

    def text(self, field: str, default: str | _Required = REQUIRED) -> str:
        """A string."""
        return self._of(str, field, default, "a string")

    def table(self, field: str) -> Fields | None:
        """A nested object, or None where the field is absent or the object is empty."""
        value = self.value(field)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self._wrong(field, "an object", value)
        return Fields(value, self.name(field))

    def names(self, field: str) -> tuple[str, ...]:
        """The names in a nested object; none where the field is absent."""
        table = self.table(field)
        return () if table is None else tuple(table.unread())

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of strings; empty where the field is absent."""
        value = self.value(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(field, "a list of strings", value)
        return tuple(value)

    def token_ids(self, field: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where the field is absent."""
        value = self.value(field)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= LARGEST for item in items):
            raise self._wrong(field, "a token id or a list of token ids", value)
        return tuple(items)

    def _of(self, kind: type[T], field: str, default: T | _Required, what: str) -> T:
        value = self.value(field)
        if value is None:
            return self._default(field, default, what)
        if not isinstance(value, kind):
            raise self._wrong(field, what, value)
        return value

    def _default(self, field: str, default: T | _Required, kind: str) -> T:
        if isinstance(default, _Required):
            raise InvalidRequest(f"{self.name(field)} is missing; it must be {kind}", field=self.name(field))
        return default

    def _wrong(self, field: str, kind: str, value: object) -> InvalidRequest:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return InvalidRequest(f"{self.name(field)} must be {kind}, not {shown}", field=self.name(field))
