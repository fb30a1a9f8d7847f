"""Text by a schema: a grammar library gives the tokens that may follow, and the executor chooses among them.

An executor may follow a grammar itself; then a run brings many tokens with a trip. Every executor knows masks: here
`llguidance` follows a JSON schema and gives the words of a mask for each token; whatever does that (`xgrammar`, a trie
of answers, a parser of your own) is used in the same way.
"""
