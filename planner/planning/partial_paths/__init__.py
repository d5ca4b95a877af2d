"""Plans whose microbatches skip or swap stages (SkipPipe)."""
