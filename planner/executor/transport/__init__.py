"""Sockets between ranks, and the client of the store; imports no other package of the executor."""
