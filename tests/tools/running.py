"""What several tests of tools run and read."""

import subprocess

from ruamel.yaml import YAML

from benchmarks.compare import Round, Unsupported


def ran(command, **options):
    """A program that has ended, with what it wrote."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def yaml(source):
    """A document, of a path or of a text."""
    return YAML(typ="safe", pure=True).load(source)


class Scripted:
    """A side of a contest whose steps take ``step_s``; it notes when its ``turns`` come."""

    def __init__(self, name, step_s=0.001, turns=None, refuses=False):
        self.facts = {"name": name, "threads": 1}
        self._name, self._step_s, self._turns, self._refuses = name, step_s, turns, refuses

    async def prepare(self, cell):
        if self._refuses:
            raise Unsupported("it cannot")

    async def round(self, cell, number, steps):
        if self._turns is not None:
            self._turns.append((number, self._name))
        return Round(step_s=[self._step_s] * steps, last=[1, 2])
