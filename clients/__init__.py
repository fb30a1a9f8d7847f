"""Programs on top of `ferrum_rpc.client`: what a scheduler's author would write, and nothing of the server."""
