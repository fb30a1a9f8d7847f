"""Write docs/transcript.md: real calls to a real server, by a program that knows nothing of Python.

`buf curl` finds the schema through server reflection and speaks JSON on its side and protobuf on the wire: what it
shows is what any client in any language meets. Handles and timings differ from run to run; the rest is deterministic,
because the identity model is.

The story is tools/transcript.md. A block that begins with ``call METHOD as NAME`` is sent, a line of JSON for each
message, and ``$NAME.output.handle`` is that part of the answer to an earlier one.
"""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format
from google.rpc import error_details_pb2

from tools.commands import ROOT
from tools.demo import child, wait_until_serving

BUF: Final = Path(sys.executable).with_name("buf")
SERVICE: Final = "ferrum_rpc.executor.v1.ModelExecutor"
CALL: Final = re.compile(r"```call (\w+)(?: as (\w+))?\n(.*?)\n```", re.DOTALL)


def told(story: str, target: str) -> str:
    """The story, with what was sent in its calls to ``target`` and what came back."""
    answers: dict[str, Any] = {}

    def part(path: re.Match[str]) -> str:
        found: Any = answers
        for key in path[1].split("."):
            found = found[int(key) if isinstance(found, list) else key]
        return json.dumps(found)

    def call(block: re.Match[str]) -> str:
        method, name, request = block.groups()
        data = re.sub(r"\$([\w.]+)", part, request)
        command = ["buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data"]
        url = f"http://{target}/{SERVICE}/{method}"
        done = subprocess.run([str(BUF), *command[1:], data, url], capture_output=True, text=True, check=False)
        found = objects(done.stdout or done.stderr)
        for detail in (detail for answer in found for detail in answer.get("details", ())):
            decode(detail)
        answers[name] = found[0]
        shown = f"$ {' '.join(command)} '{data}' \\\n    http://localhost:50051/{SERVICE}/{method}"
        return "\n".join(["```console", shown, *(json.dumps(each, indent=2) for each in found), "```"])

    return CALL.sub(call, story)


def objects(text: str) -> list[dict[str, Any]]:
    """JSON objects that follow each other."""
    found = []
    while text := text.strip():
        value, end = json.JSONDecoder().raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def decode(detail: dict[str, Any]) -> None:
    """Show what an error's detail says beside its bytes."""
    message = getattr(error_details_pb2, detail["type"].rpartition(".")[2])()
    padding = "=" * (-len(detail["value"]) % 4)
    message.ParseFromString(base64.b64decode(detail["value"] + padding))
    detail["decoded"] = json_format.MessageToDict(message)


def main() -> None:
    """Serve, call, write."""
    serve = [sys.executable, "-m", "ferrum_rpc.cli", "serve", "identity", "--port", "0", "--log-format", "json"]
    serve += ["--kv-blocks", "1024", "--grace-s", "0"]  # it leaves sequences behind, which nothing must wait for
    with child(serve, signal.SIGTERM, stderr=subprocess.PIPE) as server:
        target = wait_until_serving(server, quiet=True)
        story = Path(__file__).with_suffix(".md").read_text("utf-8")
        (ROOT / "docs" / "transcript.md").write_text(told(story, target), "utf-8")
    print("wrote docs/transcript.md")


if __name__ == "__main__":
    main()
