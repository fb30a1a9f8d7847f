"""`make compat`: the client and the stubs load and work with the oldest and the newest runtimes that we promise.

For each pair of versions, uv makes a small environment of the base requirements alone, in which a request goes through
the client's own code. Needs the package index.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Final

from tools.commands import ROOT

RUNTIMES: Final = (("grpcio==1.76.0", "protobuf==6.31.1"), ("grpcio", "protobuf>=7,<8"))
UV: Final = ("uv", "run", "--quiet", "--isolated", "--no-project", "--native-tls", "--python", sys.executable)

PROBE: Final = """
import sys
import google.protobuf, grpc
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.core import OutputSpec, Positions, TopTokens
from ferrum_rpc.executor.v1 import (
    executor_control_pb2_grpc, forward_pb2, kv_transfer_pb2_grpc, model_executor_pb2, model_executor_pb2_grpc,
    session_pb2)
from ferrum_rpc.wire.items import CallShape, item_from_proto
item = SequenceState(forward_pb2.CreateOptions()).item(7, [1, 2], OutputSpec(Positions.ALL, TopTokens(3))).proto
request = model_executor_pb2.PrefillRequest.FromString(model_executor_pb2.PrefillRequest(item=item).SerializeToString())
back = item_from_proto(request.item, CallShape.PREFILL, ())
assert back.tokens.tolist() == [1, 2] and back.output.kind.k == 3, back
assert "torch" not in sys.modules
print(f"grpcio {grpc.__version__}, protobuf {google.protobuf.__version__}: ok")
"""


def main() -> None:
    """Probe every pair."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    for runtime in RUNTIMES:
        wanted = (part for each in (*required, *runtime) for part in ("--with", each))
        command = [sys.executable, "-m", *UV, *wanted, "python", "-c", PROBE]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            sys.exit(f"the stubs do not work with {' and '.join(runtime)}")


if __name__ == "__main__":
    main()
