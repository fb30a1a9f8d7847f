"""Which revision of the contract this code speaks. A test pins the descriptors' hash to the number."""

from __future__ import annotations

SCHEMA_REVISION = 3
"""Grows with every change of protos/."""

MINIMUM_CLIENT_REVISION = 1
"""Clients built for an older revision are told so by GetInfo."""

SCHEMA_SHA256 = "e82c5c0b69ae4a8a605b6455719853f6389307ca57a3f2e29eec49cd121f1795"
"""SHA-256 over the serialized file descriptors, in the order of the test that checks it."""
