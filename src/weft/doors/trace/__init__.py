"""Traces of torch.profiler (Kineto) and others in Chrome's format: the parts of a step's time."""
