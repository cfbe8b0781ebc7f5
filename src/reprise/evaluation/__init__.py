"""What a model is worth: metrics over whole splits, baselines beside it, and the report."""
