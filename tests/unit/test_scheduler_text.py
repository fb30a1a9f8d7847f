"""Text that streams: no character is broken, none is lost, and none speaks to the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clients.scheduler.text import ByteTokenizer, FileTokenizer, TokenizerError, printable, tokenizer_for
from ferrum_rpc.scheduler import TextMatcher, TextStream

BYTES = ByteTokenizer()


class Words:
    """A tokenizer whose tokens read differently at the beginning of a text, as those of SentencePiece do."""

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f" {token}" for token in tokens).removeprefix(" ")


def pieces(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.finish()]


@given(st.text())
def test_streamed_text_is_the_text(text: str) -> None:
    out = pieces(TextStream(BYTES), BYTES.encode(text))
    assert "".join(out) == text
    assert "\ufffd" not in "".join(out) or "\ufffd" in text, "no character was shown in halves"


@given(st.binary(max_size=TextStream.LONGEST_WINDOW - 1))
def test_bytes_that_are_no_text_stream_as_they_decode(data: bytes) -> None:
    assert "".join(pieces(TextStream(BYTES), list(data))) == data.decode(errors="replace")


@given(st.binary(max_size=600))
@example(b"a" * 300 + b"\xff" * 300)
def test_bytes_that_never_become_text_do_not_hold_back_the_stream(data: bytes) -> None:
    """Nor does a token ever cost the decoding of all before it."""
    tokenizer, shown = Mock(wraps=BYTES), 0
    stream = TextStream(tokenizer)
    for at, byte in enumerate(data):
        shown += len(stream.push(byte).encode())
        assert at < TextStream.LONGEST_WINDOW or shown > 0
    assert all(len(call.args[0]) <= 2 * TextStream.LONGEST_WINDOW for call in tokenizer.decode.call_args_list)


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "shown"),
    [
        (BYTES, "aé€😀b".encode(), ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]),
        (BYTES, "a😀".encode()[:-1], ["a", "", "", "", "\ufffd"]),
        (BYTES, [256, 97, 257, 98, 263], ["", "a", "", "b", "", ""]),
        (Words(), [1, 2, 3, 4], ["1", " 2", " 3", " 4", ""]),
    ],
    ids=["each character when it is complete", "an incomplete one at the end", "special tokens", "joined as the whole"],
)
def test_what_is_shown_after_each_token(tokenizer: Any, tokens: Sequence[int], shown: list[str]) -> None:
    assert pieces(TextStream(tokenizer), list(tokens)) == shown


@pytest.fixture
def demo_folder() -> Path:
    return Path(__file__).parents[2] / "ferrum_rpc_demo" / "demo"


@pytest.mark.parametrize("text", ["And it came to pass", "naïve — “quoted” 😀\n"])
def test_the_demo_tokenizer_and_the_byte_tokenizer_are_one(demo_folder: Path, text: str) -> None:
    for path in (demo_folder, demo_folder / "tokenizer.json"):
        library = FileTokenizer(path)
        assert library.encode(text) == BYTES.encode(text)
        assert "".join(pieces(TextStream(library), [256, *library.encode(text), 256])) == text


def test_a_tokenizer_is_found_or_its_absence_explained(demo_folder: Path, tmp_path: Path) -> None:
    assert isinstance(tokenizer_for(256, None), ByteTokenizer)
    assert isinstance(tokenizer_for(264, None), ByteTokenizer)
    assert isinstance(tokenizer_for(264, demo_folder), FileTokenizer)
    with pytest.raises(TokenizerError, match=r"151936 tokens.*--tokenizer"):
        tokenizer_for(151_936, None)
    with pytest.raises(TokenizerError, match="no tokenizer at"):
        tokenizer_for(264, demo_folder / "nowhere")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        tokenizer_for(264, tmp_path / "broken.json")


@given(st.text())
def test_nothing_that_a_model_writes_can_speak_to_the_terminal(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert all(each == "\n" or (ord(each) >= 32 and not 127 <= ord(each) < 160) for each in shown)


def test_plain_text_is_shown_as_it_is() -> None:
    assert printable("In the\nbeginning: naïve 😀") == "In the\nbeginning: naïve 😀"
    assert printable("\x1b[2J\t\x7f") == "␛[2J ␡"


@given(st.text(st.sampled_from("ab€"), max_size=40), st.lists(st.text(st.sampled_from("ab€"), min_size=1), max_size=3))
def test_a_text_ends_before_the_first_stop_string_wherever_tokens_are_cut(text: str, stops: list[str]) -> None:
    matcher = TextMatcher(BYTES, tuple(stops))
    grown = ""
    for count, token in enumerate(BYTES.encode(text), 1):
        if matcher.push(token):
            read = bytes(BYTES.encode(text)[:count]).decode(errors="ignore")
            break
        if count % 3 == 0:  # with or without a look at what is there
            assert matcher.text.startswith(grown)
            grown = matcher.text
    else:
        matcher.finish()
        read = text
    found = [at for stop in stops if (at := read.find(stop)) >= 0]
    assert (matcher.stopped is not None) == bool(found)
    assert matcher.text == read[: min(found, default=len(read))]
    assert not any(stop in matcher.text for stop in stops)
