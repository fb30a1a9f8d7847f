"""Fronts: workers that speak the protocol of an existing router, on `ferrum_rpc.scheduler`. Loads no torch.

`ferrum-rpc worker smg` serves the ``vllm_engine`` protocol of smg (`smg_grpc_proto`), whose router has the HTTP, the
chat templates and the parsers of tools. The worker is the router's engine: it schedules texts on one executor or
several.

options.py     the flags, without the packages of the worker
program.py     the command: connect, serve, drain
port.py        the gRPC server: who may call, what is counted, errors as the protocol's statuses
servicer.py    the methods
requests.py    a GenerateRequest as a request of the scheduler: every field is served, or refused by its name
grammars.py    constraints as grammars of the executor
ebnf.py        EBNF as Lark
answers.py     tokens as the protocol's messages
blocks.py      events of the prefix caches, with the token ids that the router needs
folder.py      what the router needs of the model's folder
load.py        how much work there is, for the router and for Prometheus
"""
