"""Communication: P2P messages, averaging, losses, norms, codecs, and the device they leave from."""
