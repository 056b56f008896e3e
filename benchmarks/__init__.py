"""How fast, beside its peers, on the same server in the same run: ``python -m benchmarks --help``."""
