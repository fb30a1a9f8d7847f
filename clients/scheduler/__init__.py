"""The program of the reference scheduler, on `ferrum_rpc.scheduler`.

options.py   the command line            display.py  what a person sees
program.py   from the command line to the exit status
report.py    the summary of a run        text.py     tokens to text, safely while it streams

python -m clients.scheduler --target localhost:50051 --demo
python -m clients.scheduler --target localhost:50051 --demo --speculate lookup
python -m clients.scheduler --target localhost:50051 --demo --draft localhost:50052
python -m clients.scheduler --target localhost:50051 --demo --prefill-target localhost:50052
"""
