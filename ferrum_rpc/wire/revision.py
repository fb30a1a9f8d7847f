"""Which revision of the contract this code speaks. A test pins the descriptors' hash to the number."""

from __future__ import annotations

SCHEMA_REVISION = 2
"""Grows with every change of protos/."""

MINIMUM_CLIENT_REVISION = 1
"""Clients built for an older revision are told so by GetInfo."""

SCHEMA_SHA256 = "f472ee3256049f60076ba1c9a8ce16096e3d6782dd614fb276bfa4cce0976f91"
"""SHA-256 over the serialized file descriptors, in the order of the test that checks it."""
