"""Open benchmark: fixed instances, all methods, one independent checker."""
