"""Grammars: which tokens may follow, computed by a process for each grammar.

A grammar is a caller's program: it may need any time and memory to be compiled, and for each mask. So each has a
process of its own, with limits of both, and a grammar that exceeds them ends alone. `worker` is the program of these
processes, `matching` what it computes, `pool` the engine's side. The engine does not load the grammar library.
"""
