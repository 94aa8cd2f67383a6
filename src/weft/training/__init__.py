"""Tasks, data, optimizers, checkpoints and the training loop (imports torch)."""
