"""The bag's features against a slow second implementation that follows the definition word by word, in Python integers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from reprise.data.dataset import EncodedDataset
from reprise.models.bag import Bag, word_start_table

Make = Callable[..., Bag]
EVERYTHING = {"model.word_ngrams": [1, 2, 3], "model.word_skips": [1, 2], "model.character_ngrams": [1, 2, 4]}
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def words_of(model: Bag, ids: list[int]) -> list[list[int]]:
    """The text cut where a piece opens a word."""
    words: list[list[int]] = []
    for piece in ids:
        if not words or model.word_starts[piece]:
            words.append([])
        words[-1].append(piece)
    return words


def slow_features(model: Bag, ids: list[int]) -> Counter[int]:
    """How often the text has each row of the table: every n-gram listed, then hashed with the model's constants."""
    config, modulus = model.config, 2**31
    piece_code, place_code = model.piece_codes.tolist(), model.place_codes.tolist()
    words = words_of(model, ids)
    word_codes = [
        sum(piece_code[p] * place_code[min(i, len(place_code) - 1)] % modulus for i, p in enumerate(word)) % modulus
        for word in words
    ]
    codes = [piece_code[p] for p in ids]
    word_of = [number for number, word in enumerate(words) for _ in word]
    grams: list[tuple[int, list[int]]] = []  # (kind, the codes it is made of)
    kind = 0
    for n in config.word_ngrams:
        grams += [(kind, word_codes[i : i + n]) for i in range(len(words) - n + 1)]
        kind += 1
    for skip in config.word_skips:
        grams += [(kind, [word_codes[i], word_codes[i + skip + 1]]) for i in range(len(words) - skip - 1)]
        kind += 1
    for n in config.character_ngrams:
        for i in range(len(ids) - n + 1):
            # All pieces but the last in one word; the last may be the one that follows it.
            if n < 2 or word_of[i] == word_of[i + n - 2]:
                grams.append((kind, codes[i : i + n]))
        kind += 1
    found: Counter[int] = Counter()
    for kind, parts in grams:
        code = parts[0]
        for part in parts[1:]:
            code = (code * model._chain_codes[kind] + part) % modulus
        found[code * model._kind_codes[kind] % modulus % (config.num_buckets - 1) + 1] += 1
    return found


def batch_of(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    length = max(map(len, texts)) + 1
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    return ids, torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])


def total_weights(buckets: Tensor, weights: Tensor) -> list[dict[int, float]]:
    """The weight of each row of the table in each text."""
    totals: list[dict[int, float]] = []
    for bucket_row, weight_row in zip(buckets.tolist(), weights.tolist(), strict=True):
        found: dict[int, float] = {}
        for bucket, weight in zip(bucket_row, weight_row, strict=True):
            if weight:
                found[bucket] = found.get(bucket, 0.0) + weight
        totals.append(found)
    return totals


@pytest.fixture(scope="module")
def pieces(tiny_dataset: Callable[[str], EncodedDataset]) -> list[int]:
    """Real texts of the dataset hold spaces and letters; hypothesis draws from the pieces they are made of."""
    split = tiny_dataset("bag").splits["train"]
    return sorted({int(i) for n in range(50) for i in split[n].input_ids})


@pytest.mark.parametrize("changes", [{}, EVERYTHING, {"model.word_ngrams": [], "model.character_ngrams": [3]}])
@pytest.mark.parametrize("training", [False, True])
@quick
@given(data=st.data())
def test_features_are_the_n_grams(make_model: Make, pieces: list[int], changes: dict[str, Any], training: bool, data: Any) -> None:
    model = make_model("bag", {**changes, "model.num_buckets": 8192})  # as many as count slots: no two rows share one
    model.train(training)
    texts = data.draw(st.lists(st.lists(st.sampled_from(pieces), min_size=1, max_size=45), min_size=1, max_size=4))
    buckets, weights = model.features(*batch_of(texts))
    for text, found in zip(texts, total_weights(buckets, weights), strict=True):
        expected = slow_features(model, text)
        assert set(found) == set(expected)
        # Each distinct n-gram counts once, however often it occurs, and the squares sum to 1.
        assert all(math.isclose(w, 1 / math.sqrt(len(expected)), rel_tol=1e-4) for w in found.values())
        if expected:
            assert math.isclose(sum(w * w for w in found.values()), 1.0, rel_tol=1e-4)


def test_real_texts_have_the_n_grams_of_the_definition(make_model: Make, tiny_dataset: Callable[[str], EncodedDataset]) -> None:
    model = make_model("bag", {"model.num_buckets": 8192})
    split = tiny_dataset("bag").splits["train"]
    texts = [split[n].input_ids.tolist() for n in range(32)]
    for text, found in zip(texts, total_weights(*model.features(*batch_of(texts))), strict=True):
        assert set(found) == set(slow_features(model, text))


def test_rows_that_share_a_count_slot_never_weigh_more_than_one_bag(make_model: Make) -> None:
    """With more buckets than slots two n-grams may be counted as one: the bag gets shorter, never longer."""
    model = make_model("bag", {"model.num_buckets": 65536, "tokenizer.max_length": 512})
    ids = torch.randint(2, 258, (4, 400), generator=torch.Generator().manual_seed(0))
    buckets, weights = model.features(ids, torch.ones_like(ids))
    for found in total_weights(buckets, weights):
        assert 0.8 < sum(w * w for w in found.values()) <= 1.0 + 1e-4


def test_an_n_gram_that_training_never_saw_adds_nothing(
    tiny_dataset: Callable[[str], EncodedDataset], tiny_config: Any, make_model: Make
) -> None:
    from reprise.training.optim import build_optimizers

    model = make_model("bag", {"model.num_buckets": 65536}, drawn=False).train()
    optimizers = build_optimizers(model, tiny_config("bag").train.optimizer)
    seen, unseen = [70, 71, 72, 73], [200, 201, 202]
    ids, mask = batch_of([seen, seen])
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(ids, mask), torch.tensor([1, 1]))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    model.eval()
    assert not set(slow_features(model, seen)) & set(slow_features(model, unseen))
    touched = {int(row) for row in model.table.weight.detach().abs().sum(dim=1).nonzero()}
    assert touched
    assert touched <= set(slow_features(model, seen))
    with torch.inference_mode():
        assert torch.equal(model(*batch_of([unseen]))[0], model.head.bias)


def test_order_and_repetition(make_model: Make) -> None:
    model = make_model("bag", {"model.word_ngrams": [1], "model.character_ngrams": []})
    space = next(i for i, opens in enumerate(model.word_starts.tolist()) if opens and i > 2)
    word, other = [space, 70, 71], [space, 71, 70]
    with torch.inference_mode():
        logits = model(*batch_of([word, word + word, other, word + other, other + word]))
    assert torch.allclose(logits[0], logits[1], atol=1e-6), "a word twice is a word"
    assert not torch.allclose(logits[0], logits[2], atol=1e-3), "letters have places"
    assert torch.allclose(logits[3], logits[4], atol=1e-6), "a bag of words has no order"


def test_feature_dropout_leaves_out_its_share_and_keeps_the_mean(make_model: Make) -> None:
    model = make_model("bag", {"model.feature_dropout": 0.4})
    batch = batch_of([list(range(70, 110))])
    torch.manual_seed(0)
    with torch.no_grad():
        expected = model(*batch)
        model.train()
        mean = torch.stack([model(*batch) for _ in range(600)]).mean(dim=0)
    assert torch.allclose(mean, expected, atol=0.1 * float(expected.abs().max()))


def test_word_starts_are_spaces_and_ascii_punctuation() -> None:
    table = word_start_table({"<pad>": 0, "a": 1, "\u0120": 2, "\u0120a": 3, "!": 4, "\u00c3": 5, "\u00a2": 6})
    assert [i for i, opens in enumerate(table) if opens] == [0, 2, 3, 4]  # "<pad>" begins with "<"; its mask is 0


def test_codes_are_constants(make_model: Make) -> None:
    """They decide which n-grams share a row: other codes would make every trained table worthless."""
    from reprise.checkpoint import tensor_digest

    torch.manual_seed(1)
    first = dict(make_model("bag").named_buffers())
    torch.manual_seed(2)
    second = dict(make_model("bag").named_buffers())
    assert tensor_digest(first) == tensor_digest(second)
    assert first["piece_codes"][:3].tolist() == [135_958_969, 841_472_165, 1_849_911_849]
    assert ((first["piece_codes"] % 2 == 1) & (first["piece_codes"] < 2**31)).all()
