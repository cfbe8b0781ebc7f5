"""Memory: what ran, with what, how well. The only place that imports mlflow, and only where it is needed."""
