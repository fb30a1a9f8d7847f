"""A model shared by several processes: rank 0 has the queue and the accounting of the cache, and directs the others.

`links` starts the other ranks or connects to them, `placing` chooses devices and transports, `leader` is rank 0's side
of the connections, `follower` the other ranks' side, `compute` the interface for the runner. `ferrum_rpc.distributed`
has the collectives within a step.
"""
