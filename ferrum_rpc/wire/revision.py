"""Which revision of the contract this code speaks. A test pins the descriptors' hash to the number."""

from __future__ import annotations

SCHEMA_REVISION = 1
"""Grows with every change of protos/."""

MINIMUM_CLIENT_REVISION = 1
"""Clients built for an older revision are told so by GetInfo."""

SCHEMA_SHA256 = "e444349678800176515d75ab59c16598a061e97f8cfaeef5442bba0243200ccf"
"""SHA-256 over the serialized file descriptors, in the order of the test that checks it."""
