"""Averaging: the linear and mixed-integer programmes of DeDLOC and what goes with them."""
