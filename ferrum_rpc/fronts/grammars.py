"""The constraint of a request as a grammar of the executor: the same language, or a refusal by its name."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from ferrum_rpc.client import GrammarKind, InvalidRequest
from ferrum_rpc.fronts.ebnf import is_ebnf, lark_of

ANY_OBJECT: Final = '{"type": "object"}'


class Constraint(NamedTuple):
    """A grammar to be registered at the executors. Its text begins with the first token behind the prompt."""

    kind: GrammarKind
    text: str


def constraint_of(sampling: Any, max_bytes: int) -> Constraint | None:
    """The constraint of ``SamplingParams``; None if it has none. ``max_bytes``: of a grammar, as the executor takes it;
    0: unknown. Raises `InvalidRequest` with its name."""
    name = sampling.WhichOneof("constraint")
    if name is None:
        return None
    if max_bytes and (size := _size(getattr(sampling, name))) > max_bytes:
        raise InvalidRequest(f"{name} must have at most {max_bytes} bytes, got {size}", field=name)
    try:
        return _constraint(name, sampling)
    except RecursionError:
        raise InvalidRequest(f"{name} is nested too deeply", field=name) from None


def _size(value: Any) -> int:
    """Bytes of a grammar's text."""
    return len(value.encode()) if isinstance(value, str) else value.ByteSize() if hasattr(value, "ByteSize") else 0


def _constraint(name: str, sampling: Any) -> Constraint | None:
    match name:
        case "json_schema":
            return Constraint(GrammarKind.JSON_SCHEMA, _schema(sampling.json_schema))
        case "json_object":
            return Constraint(GrammarKind.JSON_SCHEMA, ANY_OBJECT) if sampling.json_object else None
        case "regex":
            return Constraint(GrammarKind.REGEX, sampling.regex)
        case "choice":
            return Constraint(GrammarKind.LARK, _one_of(list(sampling.choice.choices)))
        case "grammar":
            text = sampling.grammar
            return Constraint(GrammarKind.LARK, lark_of(text) if is_ebnf(text) else text)
        case _:
            raise InvalidRequest(f"{name} is not supported by this worker", field=name)


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"json_schema is not JSON: {error}", field="json_schema") from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("json_schema must be an object", field="json_schema")
    return text


def _one_of(choices: list[str]) -> str:
    """A grammar whose texts are these. Each is one lexeme, so none hides a longer one that it begins."""
    if not choices or not all(choices):
        raise InvalidRequest("choice must be a list of texts that are not empty", field="choice")
    alternatives = " | ".join(json.dumps(each, ensure_ascii=False) for each in dict.fromkeys(choices))
    return f"start: CHOICE\nCHOICE: {alternatives}"
