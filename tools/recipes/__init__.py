"""What a project changes to train with gradscale_ext, and how its own loss and ours are stepped side by side."""
