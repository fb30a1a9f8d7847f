"""A model that several processes share: rank 0 has the queue and the cache's books and tells the others what to do.

`links` starts the others or finds them, `placing` says where each computes and how they talk, `leader` is rank 0's side
of the connections, `follower` the others' whole life, `compute` what the runner sees. What ranks exchange in the middle
of a step is `ferrum_rpc.distributed`.
"""
