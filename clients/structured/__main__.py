"""``python -m clients.structured``."""

import sys

from clients.structured.program import main

if __name__ == "__main__":
    sys.exit(main())
