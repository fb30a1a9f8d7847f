"""Which revision of the contract this code speaks. A test pins the descriptors' hash to the number."""

from __future__ import annotations

SCHEMA_REVISION = 3
"""Grows with every change of protos/."""

MINIMUM_CLIENT_REVISION = 1
"""Clients built for an older revision are told so by GetInfo."""

SCHEMA_SHA256 = "2c0ade4935dc314da38770ec287d05236f6cc94283636c2ba60c2db64f002942"
"""SHA-256 over the serialized file descriptors, in the order of the test that checks it."""
