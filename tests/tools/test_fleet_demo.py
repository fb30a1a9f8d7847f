"""The fleet demo restarts executors in float32 where a lost text would be computed again within rounding only."""

import argparse
from types import SimpleNamespace
from unittest import mock

import pytest

from tools import fleet_demo


@pytest.mark.parametrize(
    ("exact_span_tokens", "weights", "again"), [(0, "bfloat16", True), (0, "float32", False), (64, "bfloat16", False)]
)
def test_executors_that_promise_no_equal_bits_are_started_again_in_float32(
    monkeypatch, capsys, exact_span_tokens, weights, again
):
    info = SimpleNamespace(
        limits=SimpleNamespace(exact_span_tokens=exact_span_tokens), model=SimpleNamespace(weight_dtype=weights)
    )
    started: list[tuple[str, ...]] = []

    def start(arguments, stack, *flags):
        started.append(flags)
        return [], ["first", "second"]

    client = mock.MagicMock()
    client.return_value.__enter__.return_value.info.return_value = info
    monkeypatch.setattr(fleet_demo, "ExecutorClient", client)
    monkeypatch.setattr(fleet_demo, "start", start)
    monkeypatch.setattr(fleet_demo, "child", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fleet_demo.run(argparse.Namespace(model="demo", executors=2, max_new_tokens=1, plain=True))
    assert started == [(), ("--dtype", "float32")][: 1 + again]
    assert ("In float32:" in capsys.readouterr().out) is again
