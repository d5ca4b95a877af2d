"""The open benchmark: frozen instances, all methods, one checker (docs/reference/open-benchmark.md)."""
