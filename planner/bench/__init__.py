"""The open benchmark: frozen instances, all methods, one checker."""
