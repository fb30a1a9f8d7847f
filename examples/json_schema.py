"""JSON of a schema: the executor compiles a grammar and masks each row by it, so every text is valid."""

import json
import sys

from ferrum_rpc.client import GrammarKind, Sample
from ferrum_rpc.client.sync import ExecutorClient

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "county": {"enum": ["Kent", "Surrey", "Derbyshire"]},
    },
    "required": ["name", "age", "county"],
    "additionalProperties": False,
}


def main(target: str, text: str) -> None:
    """Print a person."""
    prompt = list(text.encode())
    with ExecutorClient(target) as client, client.sequence() as sequence:
        grammar = client.register_grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
        output = Sample(temperature=0.8, seed=1, grammar=grammar, grammar_from=len(prompt))  # free up to here
        written = bytes(sequence.generate(prompt, output=output))
        print(json.dumps(json.loads(written), ensure_ascii=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
