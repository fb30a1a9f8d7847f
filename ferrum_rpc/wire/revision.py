"""Which revision of the contract this code speaks. A test pins the descriptors' hash to the number."""

from __future__ import annotations

SCHEMA_REVISION = 3
"""Grows with every change of protos/."""

MINIMUM_CLIENT_REVISION = 1
"""Clients built for an older revision are told so by GetInfo."""

SCHEMA_SHA256 = "980054936afefa1205bc54a8ac295d6e762a0b915e52cc1a2a4c3b2efd3540f8"
"""SHA-256 over the serialized file descriptors, in the order of the test that checks it."""
