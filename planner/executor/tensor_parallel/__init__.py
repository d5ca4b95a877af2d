"""Tensor parallelism: several GPUs of a machine that hold one device's stage together."""
