"""Write docs/transcript.md: real calls to a real server, by a program that knows nothing of Python.

`buf curl` finds the schema through server reflection and speaks JSON on its side and protobuf on the wire: what it
shows is what any client in any language meets. Handles and timings differ from run to run; the rest is deterministic,
because the identity model is.
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.rpc import error_details_pb2

ROOT = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).with_name("buf")
PACKAGE = "ferrum_rpc.executor.v1"


class Transcript:
    """Calls methods and writes down what was sent and what came back."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        """A paragraph between calls."""
        self.lines += [text, ""]

    def call(self, method: str, request: dict[str, Any], service: str = "ModelExecutor") -> dict[str, Any]:
        """One call; returns the answer or the error, as JSON."""
        return self._curl(method, json.dumps(request), service)[0]

    def stream(self, method: str, frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Frames sent in a row; returns those that came back."""
        return self._curl(method, "\n".join(json.dumps(frame) for frame in frames), "ModelExecutor")

    def _curl(self, method: str, data: str, service: str) -> list[dict[str, Any]]:
        url = f"http://{self._target}/{PACKAGE}.{service}/{method}"
        command = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", data, url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        answers = _objects(done.stdout or done.stderr)
        for answer in answers:
            for detail in answer.get("details", ()):
                _decode(detail)
        public = f"http://localhost:50051/{PACKAGE}.{service}/{method}"
        shown = f"buf curl --protocol grpc --http2-prior-knowledge --data '{data}' \\\n    {public}"
        self.lines += ["```console", f"$ {shown}", *(json.dumps(each, indent=2) for each in answers), "```", ""]
        return answers


def _objects(text: str) -> list[dict[str, Any]]:
    """JSON objects that follow each other."""
    found = []
    while text := text.strip():
        value, end = json.JSONDecoder().raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def _decode(detail: dict[str, Any]) -> None:
    """Show what a detail says beside its bytes."""
    message = getattr(error_details_pb2, detail["type"].rpartition(".")[2])()
    padding = "=" * (-len(detail["value"]) % 4)
    message.ParseFromString(base64.b64decode(detail["value"] + padding))
    detail["decoded"] = json_format.MessageToDict(message)


def tell(script: Transcript) -> None:
    """The story."""
    script.say(
        "# A transcript of real calls\n\n"
        "Written by `make transcript`: `ferrum-rpc serve identity` on one side, `buf curl` on the other. In JSON, "
        "64-bit numbers are strings, `bytes` are base64, and fields that are zero are left out."
    )
    script.say(
        "## A prompt of three tokens\n\nNo handle: a new sequence. Nothing asked of the output: the arg-max token."
    )
    answer = script.call("Prefill", {"item": {"tokenIds": [3, 1, 4], "requestId": "prompt-1"}})
    handle = answer["output"]["handle"]
    script.say(
        "`row_blocks[0].tokens.token_ids` is one raw little-endian U32: the next token. `output.rows` says where this "
        "item's rows stand in the blocks; with one item of one row it is `{count: 1}`."
    )
    script.say(
        "## The reply was lost: the same call again\n\nThe same `request_id` and content: nothing happens twice."
    )
    script.call("Prefill", {"item": {"tokenIds": [3, 1, 4], "requestId": "prompt-1"}})
    script.say("## One token, with the three best candidates\n\nPass the handle back whole.")
    decode = {"item": {"handle": handle, "tokenIds": [7], "output": {"topTokens": {"k": 3}}}}
    second = script.call("Decode", decode)["output"]["handle"]
    script.say("## The old handle is stale\n\nIts version is behind. The refusal says where the sequence stands.")
    script.call("Decode", decode)
    script.say(
        "## Verify a draft, then roll back and go on in one call\n\nFour tokens, four rows (arg-max each). Say that "
        "the scheduler accepts two of them: the next call rolls back to length 6 and feeds the token after them."
    )
    verify = {"item": {"handle": second, "tokenIds": [9, 2, 6, 5]}}
    third = script.call("ForwardVerify", verify)["output"]["handle"]
    fourth = script.call("Decode", {"item": {"handle": third, "truncateTo": 6, "tokenIds": [8]}})["output"]["handle"]
    script.say("## A mixed batch: a decode, a new prompt, and a mistake\n\nOne forward pass; the bad item fails alone.")
    items = [
        {"itemId": 1, "handle": fourth, "tokenIds": [5]},
        {"itemId": 2, "tokenIds": [2, 7, 1, 8]},
        {"itemId": 3, "tokenIds": [256]},
    ]
    batch = script.call("UnifiedForward", {"items": items})
    fifth = batch["results"][0]["output"]["handle"]
    script.say("## A fork shares the cache until somebody writes")
    script.call("ForkKv", {"handle": fifth, "count": 2})
    script.say("## Release, and what a released handle answers")
    script.call("Release", {"handle": fifth})
    script.call("Decode", {"item": {"handle": fifth, "tokenIds": [1]}})
    script.say(
        "## A lease\n\nThe sequence lives while the lease is renewed: by `KeepAlive`, and by any call on it. Revoking "
        "the lease frees its sequences."
    )
    lease = {"leaseId": script.call("AcquireLease", {"ttl": "20s", "clientName": "transcript"})["leaseId"]}
    script.call("Prefill", {"item": {"tokenIds": [3, 1, 4], "create": lease}})
    script.call("KeepAlive", lease)
    script.call("RevokeLease", lease)
    script.say("What a revoked lease answers:")
    script.call("KeepAlive", lease)
    script.say(
        "## A session\n\nFour frames up, four down; `stepId` tells which answers which. The keep-alive needs no step "
        "and overtakes the forward. `close` waits for both."
    )
    frames: list[dict[str, Any]] = [
        {"stepId": 1, "hello": {"clientName": "transcript", "stepsInFlight": 2}},
        {"stepId": 2, "forward": {"items": [{"itemId": 7, "tokenIds": [3, 1, 4], "requestId": "prompt-2"}]}},
        {"stepId": 3, "keepAlive": {}},
        {"stepId": 4, "close": {"releaseSequences": True}},
    ]
    script.stream("Session", frames)
    script.say("## What this version does not offer says so")
    script.call("RegisterTokenMask", {})
    script.say("## How the executor does")
    script.call("GetStatus", {})


def main() -> None:
    """Serve, call, write."""
    serve = [sys.executable, "-m", "ferrum_rpc.cli", "serve", "identity", "--port", "0", "--log-format", "json"]
    serve += ["--kv-blocks", "1024", "--grace-s", "0"]  # it leaves sequences behind: nobody is to be waited for
    with subprocess.Popen(serve, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            target = next(event["target"] for line in server.stderr if (event := json.loads(line))["event"] == "ready")
            script = Transcript(target)
            tell(script)
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()  # it logs to its end: the pipe must have a reader until then
    (ROOT / "docs" / "transcript.md").write_text("\n".join(script.lines))
    print("wrote docs/transcript.md")


if __name__ == "__main__":
    main()
