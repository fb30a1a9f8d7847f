"""Measurements: both sides of a comparison in one run on one machine, ratios before absolute figures.

No part of the package and no part of the test suite's verdict; the tests only see to it that these programs run.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `ferrum-rpc serve` does: both sides compute alike
