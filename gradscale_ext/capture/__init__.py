"""A whole learner step in one CUDA graph, and what a graph would get wrong."""
