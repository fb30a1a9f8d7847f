"""Grammars: which tokens may follow, computed by a process for each grammar.

A grammar is a caller's program: it may need any time and memory to be compiled, and for each mask. So each has a
process of its own, with limits of both, and a grammar that exceeds them ends alone. `worker` is the program of these
processes, `matching` what it computes, `messages` what is sent. On the engine's side `starter` has the first process,
`process` each of the others, `text` what is wanted of a sequence, `pool` all of them, and `constraints` what a step
needs. The engine does not load the grammar library.
"""
