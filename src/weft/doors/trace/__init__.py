"""Traces of torch.profiler (Kineto) and others in Chrome's format: where the time of a step went."""
