"""Tasks, data, optimizers, checkpoints and the training loop; needs torch."""
