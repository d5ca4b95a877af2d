"""Communication: P2P messages, sharded all-reduce, codecs and tuning of connections."""
