"""From a trained torch model to model.onnx, and the proof that both say the same."""
