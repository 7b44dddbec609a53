"""Charts of gradients over time."""
