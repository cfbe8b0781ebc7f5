"""Text to token ids, the same in training and in serving: this file needs nothing but ``tokenizers``.

Everything that decides the ids is inside the tokenizer's JSON (normaliser, pre-tokenizer, vocabulary, merges), except two rules
that the JSON cannot hold, which ``load_tokenizer`` and ``encode_texts`` add: no token of a text is ever a special token, and a
text without any token becomes one ``<unk>``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

# tokenizers encodes with threads. A process forked after that has none of them and would wait for them for ever; the library's
# own guard is a warning on every fork while this variable is unset. So it is set, and a forked child is told to use no threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: os.environ.__setitem__("TOKENIZERS_PARALLELISM", "false"))

from tokenizers import Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

if TYPE_CHECKING:
    from reprise.config import BpeTokenizerConfig

PAD_TOKEN, PAD_ID = "<pad>", 0
UNK_TOKEN, UNK_ID = "<unk>", 1
PAD_TOKENS = (PAD_TOKEN, "[PAD]", "<|padding|>")  # as the encoders of this world call it

_TEXTS_AT_ONCE = 4096  # bounds the memory that the library's Encoding objects take


class EncodedTexts(NamedTuple):
    """Token ids cut at the maximum length, and how many there were before the cut."""

    input_ids: list[list[int]]
    num_tokens: list[int]


def train_tokenizer(texts: Iterable[str] | Iterable[list[str]], config: BpeTokenizerConfig) -> Tokenizer:
    """A byte-level BPE tokenizer learnt from ``texts`` (or lists of them, which is faster).

    Their order does not matter, and every process learns the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNK_TOKEN))
    tokenizer.normalizer = _normaliser(config.normaliser)
    # The prefix space makes the first word of a text the same token as that word further on.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=[PAD_TOKEN, UNK_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return load_tokenizer(tokenizer.to_str())


def _normaliser(name: str) -> normalizers.Normalizer:
    """Canonical composition, every run of white space and control characters as one space, none at the ends, and lower case."""
    steps = [normalizers.NFC(), normalizers.Replace(Regex(r"[\s\p{Cc}]+"), " "), normalizers.Strip()]
    if name == "nfc_spaces_lower":
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence(steps)


def load_tokenizer(json_text: str) -> Tokenizer:
    """The tokenizer saved as ``json_text``, without padding or truncation of its own.

    Raises:
        ValueError: ``json_text`` is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_str(json_text)
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise ValueError(f"not the JSON of a tokenizer ({error}); run `dvc repro encode` to make it again") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # Not part of the JSON. Without it a text that contains "<pad>" gets the padding id, which the model then ignores.
    tokenizer.encode_special_tokens = True
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """Ids of padding and of the unknown token. A tokenizer that knows every byte may lack the latter: then padding stands in.

    Raises:
        ValueError: there is no padding token.
    """
    pad = next((tokenizer.token_to_id(token) for token in PAD_TOKENS if tokenizer.token_to_id(token) is not None), None)
    if pad is None:
        raise ValueError(f"the tokenizer has no padding token; looked for {', '.join(PAD_TOKENS)}")
    unk = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or UNK_TOKEN)
    return pad, pad if unk is None else unk


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Token ids of each text, at least one and at most ``max_length``, the end of the text cut off."""
    return encode_with_counts(tokenizer, texts, max_length).input_ids


def encode_with_counts(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> EncodedTexts:
    """``encode_texts``, and the number of tokens of each text before it was cut (1 for a text without any).

    Raises:
        ValueError: a text holds half of a surrogate pair, which no encoding of Unicode can write.
    """
    input_ids: list[list[int]] = []
    num_tokens: list[int] = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        whole = [encoding.ids or [UNK_ID] for encoding in _encode_batch(tokenizer, texts, start)]
        num_tokens.extend(map(len, whole))
        closing = _closing_ids(tokenizer) if any(len(ids) > max_length for ids in whole) else []
        input_ids.extend(ids if len(ids) <= max_length else ids[: max_length - len(closing)] + closing for ids in whole)
    return EncodedTexts(input_ids, num_tokens)


def _closing_ids(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer writes behind every text ([SEP], say), and what a text that is cut must end with, too."""
    empty, text = tokenizer.encode(""), tokenizer.encode("a")
    num_opening = text.special_tokens_mask.index(0)
    return list(empty.ids[num_opening:])


def _encode_batch(tokenizer: Tokenizer, texts: Sequence[str], start: int) -> list[Encoding]:
    batch = list(texts[start : start + _TEXTS_AT_ONCE])
    try:
        return tokenizer.encode_batch_fast(batch)
    except TypeError:
        for position, text in enumerate(batch, start):
            _check_text(text, position)
        raise


def _check_text(text: object, position: int) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text {position} is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text {position} holds the lone surrogate {text[error.start]!r} at character {error.start}: half of a character, "
            "which cannot be written as UTF-8; decode the text again from its source"
        ) from None
