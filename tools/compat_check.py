"""`make compat`: the client and the stubs load and work with the oldest and the newest runtimes that we promise.

Makes one small environment per pair of versions below .cache/compat (kept for the next time), installs nothing but the
base requirements, and takes a request through the client's own code in it. Needs the package index.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
RUNTIMES: Final = (("1.76.0", "6.31.1"), ("", ""))
"""(grpcio, protobuf); empty is the newest that the index has within our bounds."""

PROBE: Final = """
import sys
import google.protobuf, grpc
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.core import OutputSpec, Positions, TopTokens
from ferrum_rpc.executor.v1 import (
    executor_control_pb2_grpc, forward_pb2, kv_transfer_pb2_grpc, model_executor_pb2, model_executor_pb2_grpc,
    session_pb2)
from ferrum_rpc.wire.items import Shape, item_from_proto
item = SequenceState(forward_pb2.CreateOptions()).item(7, [1, 2], OutputSpec(Positions.ALL, TopTokens(3))).proto
request = model_executor_pb2.PrefillRequest.FromString(model_executor_pb2.PrefillRequest(item=item).SerializeToString())
back = item_from_proto(request.item, Shape.PREFILL, ())
assert back.tokens.tolist() == [1, 2] and back.output.kind.k == 3, back
assert "torch" not in sys.modules
print(f"grpcio {grpc.__version__}, protobuf {google.protobuf.__version__}: ok")
"""


def environment(grpcio: str, protobuf: str) -> Path:
    """The python of an environment with these versions and this checkout's package."""
    folder = ROOT / ".cache" / "compat" / f"grpcio-{grpcio or 'newest'}-protobuf-{protobuf or 'newest'}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    wanted = [f"grpcio=={grpcio}" if grpcio else "grpcio", f"protobuf=={protobuf}" if protobuf else "protobuf>=7,<8"]
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*install, *wanted, "googleapis-common-protos", "numpy"], check=True)
    return python


def main() -> None:
    """Probe every pair."""
    for grpcio, protobuf in RUNTIMES:
        done = subprocess.run([str(environment(grpcio, protobuf)), "-c", PROBE], cwd=ROOT, check=False)
        if done.returncode:
            sys.exit(f"the stubs do not work with grpcio {grpcio or 'newest'} and protobuf {protobuf or 'newest'}")


if __name__ == "__main__":
    main()
