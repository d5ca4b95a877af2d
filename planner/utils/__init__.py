"""What several rooms share: text, files, validation, the argument parser."""
