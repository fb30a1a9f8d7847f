"""ferrum-rpc: a model's forward pass, served over gRPC to remote schedulers."""

__version__ = "0.1.0"
