"""`python -m gradscale_ext`: the report, and the commands `check`, `bench` and `compile`."""
