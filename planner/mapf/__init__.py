"""Paths of microbatches (SkipPipe): which devices each visits, in which order, when."""
