"""Measurements: both sides of a comparison in one run on one machine, ratios before absolute figures.

No part of the package and no part of the test suite's verdict; the tests only see to it that these programs run.
"""

from ferrum_rpc.runtime import prepare

prepare()  # as `ferrum-rpc` does: both sides compute alike, and so do the callers and the bare echo
