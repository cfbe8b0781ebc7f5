from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from reprise.config import BpeTokenizerConfig
from reprise.data.tokenizer import PAD_ID, UNK_ID, encode_texts, encode_with_counts, load_tokenizer, train_tokenizer

CORPUS = [
    f"{word} {other} I can't pay 12{i} euros, café <pad> naïve 日本語 \U0001f600 {word * 2}"
    for i, (word, other) in enumerate(zip(["card", "transfer", "money", "lost"] * 20, ["please", "why", "how"] * 27, strict=False))
]


def bpe(normaliser: str = "nfc_spaces", vocab_size: int = 500) -> BpeTokenizerConfig:
    return BpeTokenizerConfig.model_validate(
        {
            "kind": "bpe",
            "vocab_size": vocab_size,
            "min_frequency": 2,
            "normaliser": normaliser,
            "max_length": 64,
            "encoder": None,
        }
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS, bpe())


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_another_process_with_one_thread_and_another_order_learns_the_same_tokenizer() -> None:
    script = """
        import hashlib, json, sys
        from reprise.config import BpeTokenizerConfig
        from reprise.data.tokenizer import encode_texts, train_tokenizer
        given = json.load(sys.stdin)
        tokenizer = train_tokenizer(given["texts"], BpeTokenizerConfig.model_validate(given["config"]))
        ids = encode_texts(tokenizer, given["texts"][::-1], 64)
        print(hashlib.sha256(tokenizer.to_str().encode()).hexdigest(), hashlib.sha256(json.dumps(ids).encode()).hexdigest())
    """
    config = bpe("nfc_spaces_lower")
    given_to_child = json.dumps({"texts": CORPUS[::-1], "config": config.model_dump(mode="json")})
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        input=given_to_child,
        env=os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    here = train_tokenizer(iter([CORPUS[:30], CORPUS[30:]]), config)
    ids = json.dumps(encode_texts(here, CORPUS, 64))
    assert child.stdout.split() == [sha256(here.to_str()), sha256(ids)]


def test_special_ids_and_vocabulary(tokenizer: Tokenizer) -> None:
    assert (tokenizer.token_to_id("<pad>"), tokenizer.token_to_id("<unk>")) == (PAD_ID, UNK_ID) == (0, 1)
    assert train_tokenizer(CORPUS, bpe(vocab_size=300)).get_vocab_size() == 300
    assert 300 < tokenizer.get_vocab_size() < 500, "a small corpus gives fewer merges than asked for"
    assert {tokenizer.token_to_id(byte) for byte in pre_tokenizers.ByteLevel.alphabet()} == set(range(2, 258))


def test_the_json_holds_no_padding_and_no_truncation(tokenizer: Tokenizer) -> None:
    saved = json.loads(tokenizer.to_str())
    assert saved["padding"] is None
    assert saved["truncation"] is None
    loaded = load_tokenizer(tokenizer.to_str())
    encode_texts(loaded, CORPUS, 3)
    assert loaded.to_str() == tokenizer.to_str()


def test_padding_and_truncation_in_a_json_are_not_obeyed(tokenizer: Tokenizer) -> None:
    other = Tokenizer.from_str(tokenizer.to_str())
    other.enable_padding(length=20)
    other.enable_truncation(2)
    texts = ["one two three four", "x"]
    assert encode_texts(load_tokenizer(other.to_str()), texts, 64) == encode_texts(tokenizer, texts, 64)


@pytest.mark.parametrize("text", ["<pad>", "a <pad> b <unk>", "<unk>", "<pad><pad>"])
def test_a_special_token_in_a_text_is_text(tokenizer: Tokenizer, text: str) -> None:
    for use in (tokenizer, load_tokenizer(tokenizer.to_str())):
        (ids,) = encode_texts(use, [text], 64)
        assert not {PAD_ID, UNK_ID} & set(ids)


@pytest.mark.parametrize("text", ["", " ", "\t\n\r ", "\x00", "\u00a0\u2003\u2028", "\x85"])
def test_a_text_without_a_token_becomes_one_unk(tokenizer: Tokenizer, text: str) -> None:
    assert encode_with_counts(tokenizer, [text, "x"], 8).input_ids[0] == [UNK_ID]
    assert encode_with_counts(tokenizer, [text], 8).num_tokens == [1]


def test_long_texts_are_cut_at_the_end_and_counted_whole(tokenizer: Tokenizer) -> None:
    text = "lost card please " * 50
    (whole,) = encode_texts(tokenizer, [text], 10_000)
    cut = encode_with_counts(tokenizer, [text, "card"], 7)
    assert cut.input_ids[0] == whole[:7]
    assert cut.num_tokens[0] == len(whole) > 7
    assert cut.num_tokens[1] == len(cut.input_ids[1])


def test_composed_and_decomposed_and_spaces_are_one(tokenizer: Tokenizer) -> None:
    variants = ["café time", "cafe\u0301 time", "  café\u00a0\t time\n", "café\x00time", "café\u2028time"]
    assert len({tuple(ids) for ids in encode_texts(tokenizer, variants, 64)}) == 1


def test_case_is_kept_or_not_as_params_say() -> None:
    for normaliser, same in (("nfc_spaces", False), ("nfc_spaces_lower", True)):
        upper, lower = encode_texts(train_tokenizer(CORPUS, bpe(normaliser)), ["CARD É", "card é"], 64)
        assert (upper == lower) is same


def test_the_first_word_is_the_same_token_as_further_on(tokenizer: Tokenizer) -> None:
    alone, behind = encode_texts(tokenizer, ["card", "lost card"], 64)
    assert behind[-len(alone) :] == alone


def _byte_of() -> dict[str, int]:
    """The byte that each letter of the byte-level alphabet stands for: the GPT-2 table, written anew."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


# Unassigned characters are left out: what they normalise to depends on the version of Unicode.
ANY_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=40)


@given(texts=st.lists(ANY_TEXT, max_size=6))
@settings(max_examples=100, deadline=None)
def test_tokens_spell_the_normalised_text(tokenizer: Tokenizer, texts: list[str]) -> None:
    byte_of = _byte_of()
    for text, ids in zip(texts, encode_texts(tokenizer, texts, 10_000), strict=True):
        clean = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", unicodedata.normalize("NFC", text)).strip(" ")
        if not clean:
            assert ids == [UNK_ID]
            continue
        spelled = "".join(tokenizer.id_to_token(i) for i in ids)
        assert bytes(byte_of[letter] for letter in spelled).decode() == " " + clean


@given(texts=st.lists(ANY_TEXT, max_size=6), max_length=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_a_text_encodes_the_same_alone_and_in_company(tokenizer: Tokenizer, texts: list[str], max_length: int) -> None:
    together = encode_texts(tokenizer, texts, max_length)
    assert together == [encode_texts(tokenizer, [text], max_length)[0] for text in texts]
    assert all(1 <= len(ids) <= max_length for ids in together)


def test_more_texts_than_are_encoded_at_once_keep_their_order(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode_texts(tokenizer, CORPUS, 64)
    monkeypatch.setattr("reprise.data.tokenizer._TEXTS_AT_ONCE", 7)
    assert encode_texts(tokenizer, CORPUS, 64) == whole


def test_wrong_texts_are_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"text 1 holds the lone surrogate '\\ud800' at character 2"):
        encode_texts(tokenizer, ["fine", "ab\ud800"], 8)
    from_a_table: list[Any] = [float("nan")]
    with pytest.raises(ValueError, match="text 0 is float, not a string"):
        encode_texts(tokenizer, from_a_table, 8)


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"version": "1.0"}'])
def test_what_is_not_a_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the JSON of a tokenizer"):
        load_tokenizer(text)


def _encode_in_child(json_text: str, texts: list[str], queue: multiprocessing.Queue[list[list[int]]]) -> None:
    queue.put(encode_texts(load_tokenizer(json_text), texts, 64))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_encodes_too_without_hanging_or_warning(tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    here = encode_texts(tokenizer, CORPUS * 5, 64)  # the threads of this process are now running
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_encode_in_child, args=(tokenizer.to_str(), CORPUS * 5, queue))
    child.start()
    try:
        assert queue.get(timeout=30) == here
    finally:
        child.kill()
        child.join()
    assert "parallelism" not in capfd.readouterr().err


def test_serving_needs_only_the_tokenizers_library() -> None:
    script = "import sys; before = set(sys.modules); import reprise.data.tokenizer; print(*(set(sys.modules) - before))"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in child.stdout.split()}
    assert "tokenizers" in loaded
    assert not loaded & {"numpy", "pyarrow", "pydantic", "torch", "pandas", "httpx", "yaml"}
