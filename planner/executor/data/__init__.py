"""What is trained on: the tokens of any microbatch of any step, made alike by every process."""
