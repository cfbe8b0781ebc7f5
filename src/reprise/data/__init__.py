"""From the files a person has to memory-mapped token ids; nothing here knows of torch, MLflow or Prefect."""
