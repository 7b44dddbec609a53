"""The changes with which a project trains with gradscale_ext, and how its loss and ours are stepped in lockstep."""
