"""C for what torch does badly on a CPU, and nothing else. The sources are in src/, the callers on their floors."""
