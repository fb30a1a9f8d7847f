"""`ferrum-rpc fleet`: executors on a Ray cluster.

Ray finds and reserves resources, and restarts what died with its node. Everything else is the executor's own: the
program is `ferrum-rpc serve`, a child of an actor that only watches it. This package handles neither models nor calls.
"""
