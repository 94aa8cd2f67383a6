"""The runtime: launch, channels, executor, recorder, stages (imports torch)."""
