"""The demo models can be trained anew: weights of the committed shape, and a card with the figures of the run."""

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tools.demo_model import train  # noqa: E402
from tools.demo_model.corpus import Corpus, _r_strings, split_words, to_ascii  # noqa: E402

TEXT = "It was so. " * 700
PACKAGES = ("r-cran-janeaustenr", "golang-github-pierrec-lz4-dev", "bible-kjv", "bible-kjv-text")


def test_a_run_writes_weights_of_the_committed_shape_and_its_figures_into_the_card(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "load", lambda cache: Corpus([TEXT], [TEXT[:600]], dict.fromkeys(PACKAGES, "9.9-9")))
    monkeypatch.setattr(train, "sample", lambda model, prompt, new, temperature: f"{prompt}it was {temperature} so")
    monkeypatch.setattr(train, "RECIPES", train.RECIPES | {"target": train.Recipe(2, 9, 3e-3)})
    monkeypatch.setattr(train, "SEGMENTS", 1)  # a quarter of a step's text
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    train.main(["--out", str(tmp_path), "--steps", "2", "--eager", "--seed", "3"])
    for role, folder in train.FOLDERS.items():
        model = train.stored(tmp_path / folder)
        assert {name: each.shape for name, each in model.state_dict().items()} == {
            name: each.shape for name, each in train.stored(train.ASSETS / folder).state_dict().items()
        }
        card = (tmp_path / folder / "README.md").read_text("utf-8")
        assert re.search(r"^\| seed \| 3 \|$", card, re.MULTILINE) and "| steps | 2 of 4,096 bytes" in card
        assert f"train --role {role} --seed 3 --steps 2 " in card and "`bible-kjv` 9.9-9, " not in card
        assert "`r-cran-janeaustenr` 9.9-9." in card and "She looked at him it was 0.7 so\n```" in card
        committed = (train.ASSETS / folder / "README.md").read_text("utf-8")
        assert [line for line in card.splitlines() if line[:1] == "#"] == [
            line for line in committed.splitlines() if line[:1] == "#"
        ]
        assert {each.name for each in (tmp_path / folder).iterdir()} == {*train.GIVEN, "model.safetensors"}


def test_a_figure_without_a_place_in_the_card_is_an_error():
    assert train.update_card("| seed | 1 |", {r"^\| seed \| [^\n]*": "| seed | 2 |"}) == "| seed | 2 |"
    with pytest.raises(ValueError, match="no place for"):
        train.update_card("nothing", {r"^\| seed \| [^\n]*": "| seed | 2 |"})


def test_text_is_reduced_to_ascii_and_words():
    assert to_ascii("\u201cBrontë\u201d \u2014 caf\u00e9") == '"Bronte" -- cafe'
    assert split_words('"Oh!--no," said she') == ["oh", "no", "said", "she"]
    header, length = (2, 0, 0, 16, 1), (0x40009, 2)
    data = b"X\n" + b"".join(each.to_bytes(4, "big") for each in (*header, *length)) + b"hi"
    assert _r_strings(data) == ["hi"]
