"""One rank at work: model stage, operations, optimizers, and the loop over steps."""
