"""The fused multi-step loss: the module, the function, the operator, and priorities."""
