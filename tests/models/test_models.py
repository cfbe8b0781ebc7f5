"""What every model must do: two inputs, logits, nothing from padding, nothing from the neighbours in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from reprise.config import Config
from reprise.data.dataset import EncodedDataset

Make = Callable[..., nn.Module]
KINDS = ("bag", "cnn", "transformer", "pretrained")
each_kind = pytest.mark.parametrize("kind", KINDS)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
rows = st.lists(st.lists(st.integers(1, 257), min_size=1, max_size=20), min_size=1, max_size=5)


def pad(texts: list[list[int]], length: int, junk: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(texts), length), junk)
    mask = torch.zeros_like(ids)
    for i, text in enumerate(texts):
        ids[i, : len(text)] = torch.tensor(text)
        mask[i, : len(text)] = 1
    return ids, mask


@each_kind
@quick
@given(texts=rows, extra=st.integers(0, 4), junk=st.integers(0, 257))
def test_padding_and_what_stands_in_it_never_change_the_logits(
    kind: str, make_model: Make, texts: list[list[int]], extra: int, junk: int
) -> None:
    model = make_model(kind)
    with torch.inference_mode():
        together = model(*pad(texts, max(map(len, texts)) + extra, junk))
        for row, text in zip(together, texts, strict=True):
            alone = model(*pad([text], len(text)))[0]
            assert (row - alone).abs().max() < 1e-5 * max(1, float(alone.abs().max()))


@each_kind
def test_a_wrong_mask_would_be_seen(kind: str, make_model: Make) -> None:
    """The test above is blind if ids beyond the text make no difference to begin with."""
    model = make_model(kind)
    ids, mask = pad([[70, 80, 90]], 6, junk=120)
    with torch.inference_mode():
        assert (model(ids, mask) - model(ids, torch.ones_like(mask))).abs().max() > 1e-3


@each_kind
def test_a_row_of_padding_alone_gives_finite_logits_and_gradients(kind: str, make_model: Make) -> None:
    ids, mask = pad([[], [70, 80]], 4)
    model = make_model(kind, drawn=False)
    with torch.inference_mode():
        assert model(ids, mask).isfinite().all()
    model.train()
    for batch in ((ids, mask), pad([[]], 1)):
        model.zero_grad(set_to_none=True)
        logits = model(*batch)
        nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)).backward()
        assert logits.isfinite().all()
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.to_dense().isfinite().all()


@each_kind
def test_logits_not_probabilities(kind: str, make_model: Make) -> None:
    logits = make_model(kind)(*pad([[70, 80, 90], [100]], 3)).detach()
    assert logits.shape == (2, 5)
    assert logits.dtype == torch.float32
    assert (logits < 0).any()
    assert not torch.allclose(logits.sum(dim=1), torch.ones(2))
    assert not any(isinstance(m, nn.Softmax | nn.LogSoftmax) for m in make_model(kind).modules())
    model = make_model(kind)
    (model.head[-1] if kind == "pretrained" else model.head).bias.data += 7
    assert torch.allclose(model(*pad([[70, 80, 90], [100]], 3)).detach(), logits + 7, atol=1e-5), "the head is the last thing"


@each_kind
def test_buffers_move_and_are_saved(kind: str, make_model: Make) -> None:
    model = make_model(kind)
    expected = {"bag": {"word_starts", "piece_codes", "place_codes"}, "transformer": {"positions"}}
    own = {name for name, _ in model.named_buffers() if not name.startswith("encoder.transformer.")}
    assert own == expected.get(kind, set())
    assert own <= set(model.state_dict())
    assert {t.device.type for t in make_model(kind).to("meta").state_dict().values()} == {"meta"}
    # No tensor hides outside: it would stay behind on `.to(device)`.
    for module in model.modules():
        known = {*module._parameters, *module._buffers, *module._modules}
        assert [n for n, v in vars(module).items() if isinstance(v, Tensor | nn.Module) and n not in known] == []
        assert not any(
            isinstance(v, list | tuple | dict) and any(isinstance(x, nn.Module) for x in v)
            for n, v in vars(module).items()
            if not n.startswith("_")
        )


@each_kind
def test_the_state_of_one_model_makes_another_the_same(kind: str, make_model: Make) -> None:
    first, second = make_model(kind), make_model(kind, drawn=False)
    second.load_state_dict(first.state_dict())
    batch = pad([[70, 80, 90], [100]], 3)
    assert torch.equal(first(*batch), second(*batch))
    state = first.state_dict()
    state.pop(next(iter(state)))
    with pytest.raises(RuntimeError, match="Missing key"):
        second.load_state_dict(state)


@each_kind
def test_dropout_only_in_training(kind: str, make_model: Make) -> None:
    model, batch = make_model(kind), pad([[70, 80, 90, 33, 100, 101, 102], [100]], 7)
    assert torch.equal(model(*batch), model(*batch))
    model.train()
    assert not torch.equal(model(*batch), model(*batch))


@each_kind
def test_without_dropout_training_and_evaluation_agree(kind: str, make_model: Make) -> None:
    dropouts = {"bag": ["feature_dropout"], "pretrained": ["encoder_dropout", "head_dropout"]}
    off: dict[str, Any] = {f"model.{name}": 0.0 for name in dropouts.get(kind, ["dropout", "token_dropout"])}
    model, batch = make_model(kind, off), pad([[70, 80, 90, 33, 100, 101, 102], [100], []], 9)
    with torch.no_grad():
        assert torch.allclose(model.train()(*batch), model.eval()(*batch), atol=1e-5)


@each_kind
def test_the_same_seed_draws_the_same_weights(
    kind: str, make_model: Make, tiny_dataset: Callable[[str], EncodedDataset], tiny_config: Callable[..., Config]
) -> None:
    first, second = make_model(kind, drawn=False).state_dict(), make_model(kind, drawn=False).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
