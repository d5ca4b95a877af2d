"""One rank at work: stage module, operations, optimizers, and the loop over steps."""
