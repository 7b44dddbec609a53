"""How large gradients are: statistics, clipping and norms of many tensors in one pass."""
