"""`ferrum-rpc fleet`: executors on a Ray cluster.

Ray finds the room, keeps it, and starts again what died with its node. Everything else is the executor's own: what runs
is `ferrum-rpc serve`, a child of an actor that only watches it. Nobody here looks at a model or at a call.
"""
