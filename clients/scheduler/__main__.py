"""``python -m clients.scheduler``. What it needs is imported here, so that Ctrl-C meanwhile is a line too."""

import sys

if __name__ == "__main__":
    try:
        from clients.scheduler.program import main
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(main())
