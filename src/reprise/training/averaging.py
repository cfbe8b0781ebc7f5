"""A moving average of the weights, which often generalises better than the last ones: it is what is validated and shipped.

Source: Polyak & Juditsky 1992 (doi:10.1137/0330046); https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

_PREFIX = "module."


def moving_average(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """A copy of ``model`` whose weights become ``decay * average + (1 - decay) * weights`` at each update; None without a decay.

    The first update takes the weights as they are. Buffers are those of the copy: no model here changes its own.
    """
    if decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]  # torch gives it no types


def shipped_weights(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a checkpoint that were validated: the average where there is one, else the model's own."""
    average = {name.removeprefix(_PREFIX): value for name, value in saved["average"].items() if name.startswith(_PREFIX)}
    return average or saved["model"]
