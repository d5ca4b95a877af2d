"""Weights in the Hugging Face format."""
