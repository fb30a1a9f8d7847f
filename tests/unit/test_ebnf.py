"""EBNF as Lark: the same texts, which a reading of the EBNF itself finds, character by character; or a refusal."""

from __future__ import annotations

import itertools
import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from ferrum_rpc.client import InvalidRequest
from ferrum_rpc.fronts.ebnf import is_ebnf, lark_of
from tests.support.grammars import END, MODEL, VOCABULARY


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer((MODEL / "tokenizer.json").read_text("utf-8"), n_vocab=VOCABULARY, eos_token=END)


def matcher_of(lark: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer(), LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether a text is complete under a grammar. The demo's tokens are bytes."""
    ids = [*text.encode(), END]
    return matcher.validate_tokens(ids) == len(ids)


def language(lark: str, alphabet: str, longest: int) -> set[str]:
    matcher = matcher_of(lark)
    texts = ("".join(each) for size in range(longest + 1) for each in itertools.product(alphabet, repeat=size))
    return {text for text in texts if accepts(matcher, text)}


LANGUAGES = {
    "a literal that begins another one": ('root ::= ("a" | "ab") "bc"', "abc", {"abc", "abbc"}),
    "a set that has the next one": ('root ::= [ab]+ "b" "!"', "ab!", {"ab!", "bb!", "aab!", "abb!", "bab!", "bbb!"}),
    "a rule that calls itself": ('root ::= "(" root? ")"', "()", {"()", "(())"}),
    "rules with dashes, comments and lines": (
        'root ::= item ("," item){0,1} # list\nitem ::=\n  "x"\n  | the-other\nthe-other ::= [^x,]',
        "xy,",
        {"x", "y", "x,x", "x,y", "y,x", "y,y"},
    ),
    "counts": ('root ::= "a"{2} "b"{ 1 , }', "ab", {"aab", "aabb"}),
    "an empty alternative": ('root ::= "a" ("b" | ) "a"', "ab", {"aa", "aba"}),
    "an empty literal": ('root ::= "" "a"', "a", {"a"}),
    "a range and a dash": ("root ::= [a-b\\-] [-c]", "abc-", {f"{x}{y}" for x in "ab-" for y in "-c"}),
    "escapes": (r'root ::= "\"\\" [\x61-\u0062]', '"\\ab', {'"\\a', '"\\b'}),
    "any character": ('root ::= . "é"', "aé\n", {"aé", "éé", "\né"}),
    "repeated repetitions": ('root ::= ("a"+)? "b"', "ab", {"b", "ab", "aab", "aaab"}),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_lark_has_the_texts_of_the_ebnf_and_no_others(name: str) -> None:
    ebnf, alphabet, texts = LANGUAGES[name]
    assert is_ebnf(ebnf)
    assert language(lark_of(ebnf), alphabet, 4) == texts


REFUSED = {
    'root ::= "a" item': "the rule 'item' is not defined",
    'item ::= "a"': "has no rule 'root'",
    'root ::= "a"\nroot ::= "b"': "is defined twice",
    'root ::= ("a"': "a parenthesis is not closed",
    'root ::= * "a"': "'*' has nothing to repeat",
    "root ::= [b-a]": "is empty",
    "root ::= []": "has no characters",
    r'root ::= "\q"': "escape \\q",
    r'root ::= "\ud800"': "is not a character",
    'root ::= (?= "a") "a"': "no equivalent in Lark",
    'root ::= <think> "a"': "no equivalent in Lark",
    '"a" root ::= "b"': "must begin with",
    'root ::= "a\n"': "no equivalent in Lark",
}


@pytest.mark.parametrize("ebnf", REFUSED)
def test_what_is_wrong_or_has_no_equivalent_is_refused_with_its_reason(ebnf: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        lark_of(ebnf)
    assert REFUSED[ebnf] in refusal.value.message
    assert refusal.value.field == "grammar"


def test_lark_is_not_taken_for_ebnf() -> None:
    assert not is_ebnf('start: "a" | "b"')


def test_a_grammar_of_json_accepts_json() -> None:
    ebnf = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\] | "\\" (["\\/bfnrt]) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ws
ws ::= ([ \t\n] ws)?
"""
    matcher = matcher_of(lark_of(ebnf))
    value = {"name": 'a"b\\c', "of": [1, -2.5, True, None, {}], "é": "ü"}
    assert accepts(matcher, json.dumps(value, ensure_ascii=False))
    assert accepts(matcher, "{}")
    assert not accepts(matcher, '{"a": }')
    assert not accepts(matcher, "[1]")
