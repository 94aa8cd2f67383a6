"""What a rank keeps of its stages: weights, gradients, shares and what optimizers step."""
