"""Logits for a whole split."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from reprise.batches import batches_by_length, collate_for
from reprise.data.dataset import Split


def predict(model: nn.Module, split: Split, batch_size: int, device: torch.device, pad_id: int) -> NDArray[np.float32]:
    """float32 [N, C] logits (of an encoder: vectors) in the order of the split's rows; the model's train/eval mode is as before.

    ``eval()`` switches dropout off but does not stop autograd; ``inference_mode`` does. Always in fp32, whatever training used:
    what is judged here is what will be shipped.
    """
    was_training = model.training
    model.eval()
    logits: NDArray[np.float32] | None = None
    try:
        with torch.inference_mode():
            for cpu_batch in batches_by_length(split, batch_size, collate_for(split, pad_id)):
                batch = cpu_batch.to(device)
                values = model(*batch.inputs).float().cpu().numpy()
                if logits is None:
                    logits = np.empty((len(split), values.shape[1]), dtype=np.float32)
                logits[cpu_batch.positions.numpy()] = values
    finally:
        model.train(was_training)
    if logits is None:
        raise ValueError("the split has no rows to predict")
    return logits
