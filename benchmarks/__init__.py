"""Measurements: both sides of a comparison in one run on one machine, ratios before absolute figures.

No part of the package and no part of the test suite's verdict; the tests only see to it that these programs run.
"""

from ferrum_rpc.openmp import wait_briefly
from ferrum_rpc.polling import poll_directly

wait_briefly()  # as `ferrum-rpc serve` does: both sides compute alike
poll_directly()  # as it does too, and so do the callers and the bare echo
