"""What several packages share: text, files, validation, the argument parser."""
