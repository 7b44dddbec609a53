"""Recipes: changes to other projects' code that make it use gradscale_ext.

The modules lockstep, checkout and project run the original and the changed code on the same data.
"""
