"""One call of the multi-step loss: its arguments, their checks, and its output."""
