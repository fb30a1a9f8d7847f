"""`ferrum-rpc top`: the state and the rates of several executors, once or continuously.

`figures` computes what two answers of an executor say, `board` has a row for each executor, `screen` lays the rows out,
and `program` is the command.
"""
