"""Training data: tokens of any microbatch of any step, the same in every process."""
