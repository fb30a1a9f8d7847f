"""The demo models can be trained anew: weights of the committed shape, and the figures of the run."""

import re
import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tools.demo_model import train  # noqa: E402
from tools.demo_model.corpus import Corpus, _r_strings, to_ascii  # noqa: E402

TEXT = "It was so. " * 700


def test_a_run_writes_weights_of_the_committed_shape_and_says_what_they_are_worth(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "load", lambda cache: Corpus([TEXT], [TEXT[:600]], {"some-package": "9.9-9"}))
    monkeypatch.setattr(train, "SEGMENTS", 1)  # a quarter of a step's text
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for folder in train.FOLDERS.values():
        (tmp_path / folder).mkdir()
        shutil.copy(train.ASSETS / folder / "config.json", tmp_path / folder)
    train.main(["--out", str(tmp_path), "--steps", "2", "--eager", "--seed", "3"])
    for folder in train.FOLDERS.values():
        assert {name: each.shape for name, each in train.stored(tmp_path / folder).state_dict().items()} == {
            name: each.shape for name, each in train.stored(train.ASSETS / folder).state_dict().items()
        }
    said = capsys.readouterr().out
    assert re.search(
        r"^target: \d\.\d{3} nats/byte in training, \d\.\d{3} nats/byte, .* bits/byte held out", said, re.M
    )
    assert re.search(r"^draft: .*; greedy acceptance \d+\.\d%$", said, re.M) and "'some-package': '9.9-9'" in said


def test_text_is_reduced_to_ascii():
    assert to_ascii("\u201cBrontë\u201d \u2014 caf\u00e9") == '"Bronte" -- cafe'
    header, length = (2, 0, 0, 16, 1), (0x40009, 2)
    data = b"X\n" + b"".join(each.to_bytes(4, "big") for each in (*header, *length)) + b"hi"
    assert _r_strings(data) == ["hi"]
