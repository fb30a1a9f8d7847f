"""Files alone: the models of `ferrum-rpc serve demo` and `demo-draft`."""
