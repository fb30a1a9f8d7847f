"""Promises with a front between client and executor, at the size of CI."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import pytest

from tests.faults.figures import Promise, hold
from tests.faults.promises import OF_FRONTS

MISSING: Final = [each for each in ("smg", "smg_grpc_proto", "openai") if find_spec(each) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.mark.parametrize("promise", OF_FRONTS, ids=lambda each: each.__name__)
async def test_it_holds(promise: Promise) -> None:
    await hold(promise)
