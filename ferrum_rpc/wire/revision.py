"""Which revision of the contract this code speaks. A test pins the descriptors' hash to the number."""

from __future__ import annotations

SCHEMA_REVISION = 2
"""Grows with every change of protos/."""

MINIMUM_CLIENT_REVISION = 1
"""Clients built for an older revision are told so by GetInfo."""

SCHEMA_SHA256 = "68cc6e96e27ab1c31d0a437e0b717a23bfaa23eb3335c0371ea760d9303da8f6"
"""SHA-256 over the serialized file descriptors, in the order of the test that checks it."""
