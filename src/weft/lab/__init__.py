"""A mixed cluster emulated on one Linux machine: network namespaces, limited rates, processor quotas."""
