"""Seeing gradients: statistics, clipping, monitoring, and why there is none."""
