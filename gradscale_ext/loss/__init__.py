"""The fused multi-step loss: arguments, their checks, the operator, and the output."""
