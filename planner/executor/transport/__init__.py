"""The leaf of communication: connections between ranks, and the store."""
