"""What ships: model.onnx, read with onnxruntime, tokenizers and numpy. Nothing here may import torch, pyarrow or mlflow."""

import os

# onnxruntime reads this when it is imported. Asking a model for a label must not send anything anywhere.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
