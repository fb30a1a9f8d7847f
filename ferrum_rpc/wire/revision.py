"""Which revision of the contract this code speaks. A test pins the descriptors' hash to the number."""

from __future__ import annotations

SCHEMA_REVISION = 3
"""Grows with every change of protos/."""

MINIMUM_CLIENT_REVISION = 1
"""Clients built for an older revision are told so by GetInfo."""

SCHEMA_SHA256 = "958f88b76479799cea44da1aa303bced234b07b50518a0b744fce38e4be79662"
"""SHA-256 over the serialized file descriptors, in the order of the test that checks it."""
