"""The reference scheduler: continuous batching on `ferrum_rpc.client` alone.

It shows what a scheduler on this contract looks like, and it is the one that the demo runs. The executor owns weights
and cache; everything else is decided here, on the far side of a wire:

The library, which knows no terminal and no command line:

    request.py   a request: what is known of it, what it owes, its sequence
    policy.py    pure: what runs in the next step, who is admitted, who is preempted
    runs.py      several tokens with one trip, and the next run behind the present
    speculation.py  guesses of what comes next, from the text itself or a smaller model
    refusals.py  what the executor's refusals mean, and for how long they are waited out
    queues.py    who waits, who runs and who moves with one executor
    port.py      one executor: how full it is, work items, and calls until they are answered
    driver.py    turns each plan into one forward call, and each answer into tokens
    router.py    a driver at each of several executors, and the sequences that move between them
    report.py    what the run was like
    text.py      tokens to text, safely while it streams

The program on top of it:

    options.py   the command line            display.py  what a person sees
    program.py   from the command line to the exit status

    python -m clients.scheduler --target localhost:50051 --demo
    python -m clients.scheduler --target localhost:50051 --demo --speculate lookup
    python -m clients.scheduler --target localhost:50051 --demo --draft localhost:50052
    python -m clients.scheduler --target localhost:50051 --demo --prefill-target localhost:50052
"""
