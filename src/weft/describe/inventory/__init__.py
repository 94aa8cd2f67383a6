"""Clusters as their tools list them, and the CLUSTER.toml drafted from them."""
