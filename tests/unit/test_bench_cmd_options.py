"""The flags of `ferrum-rpc bench`: what they mean together, and what contradicts itself."""

import argparse
import subprocess
import sys

import pytest

from ferrum_rpc.bench.options import add_flags, output, output_name, workload_from
from ferrum_rpc.core import FullLogits, Greedy, RowDType, TopTokens
from ferrum_rpc.errors import InvalidRequest


def workload(*flags):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    return workload_from(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"seconds": 10.0, "steps": None}),
        ("--steps 7", {"seconds": None, "steps": 7}),
        ("--batch 8 --depth 3", {"sequences": 24}),
        ("--callers 5", {"sequences": 5, "batch": 1, "single": True}),
        ("--depth 5", {"single": False}),
        ("--context 33", {"prompt_tokens": 33}),
        ("--context 33 --prompt-tokens 5", {"prompt_tokens": 5}),
    ],
)
def test_what_flags_mean_together(flags, expected):
    made = workload(*flags.split())
    assert {name: getattr(made, name) for name in expected} == expected


@pytest.mark.parametrize("flags", [("--batch", "2"), ("--depth", "2"), ("--way", "session")])
def test_callers_contradict_batches_and_sessions(flags):
    with pytest.raises(InvalidRequest, match="--callers"):
        workload("--callers", "2", *flags)


@pytest.mark.parametrize(
    "flags", [("--batch", "0"), ("--rate", "0"), ("--rate", "inf"), ("--seconds", "-1"), ("--output", "top:0")]
)
def test_a_number_that_measures_nothing_is_refused(flags):
    with pytest.raises(argparse.ArgumentError, match=flags[0]):
        workload(*flags)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("greedy", Greedy()),
        ("top:8", TopTokens(8)),
        ("full:f32", FullLogits()),
        ("full:bf16", FullLogits(RowDType.BF16)),
    ],
)
def test_an_output_reads_as_it_is_written(text, kind):
    assert output(text) == kind
    assert output_name(output(text)) == text


def test_an_output_that_does_not_exist_names_those_that_do():
    for text in ("top", "top:x", "greedy:1", "full:int8", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="greedy, top:8, full"):
            output(text)


def test_the_flags_need_no_grpc():
    program = "import ferrum_rpc.cli, sys; ferrum_rpc.cli.build_parser(); print({'grpc', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
