"""The states of a rank's stages: weights, gradients, shards and the masters that optimizers step."""
