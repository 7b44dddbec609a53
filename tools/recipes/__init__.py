"""Recipes: changes to other projects' code that make it use gradscale_ext, and tools that run both in lockstep."""
