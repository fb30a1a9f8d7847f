"""The service floor: handles, versions, replay, admission and the gRPC servicers. Imports no torch."""
