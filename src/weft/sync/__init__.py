"""How replicas agree (imports torch)."""
