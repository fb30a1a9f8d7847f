"""Measurements: both sides of a comparison in one run on one machine, ratios before absolute figures.

No part of the package and no part of the test suite's verdict; the tests only see to it that these programs run.
"""

from ferrum_rpc.openmp import wait_briefly

wait_briefly()  # as `ferrum-rpc serve` does: both sides compute alike
