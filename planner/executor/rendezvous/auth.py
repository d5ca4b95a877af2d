"""Authentication: ranks prove the run's secret to each other, in the store and on each connection.

The store itself has no access control: anyone who reaches its port can read and write. Its content
is therefore no proof; a proof answers a nonce drawn by its reader.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from planner.executor.rendezvous.secret import NONCE_BYTES, PROOF_BYTES, Secret, nonce
from planner.utils.refusal import Refusal
from planner.utils.text import listed

if TYPE_CHECKING:
    from planner.executor.rendezvous.rank_group import RankGroup


class AuthenticationError(Refusal):
    """A rank does not know the secret."""


def authenticate_all(ranks: RankGroup, context_text: str) -> None:
    """Prove the secret to all ranks and verify theirs; a collective call."""
    secret, rank, names = ranks.secret, ranks.rank, ranks.names
    assert secret is not None
    own_nonce = nonce().hex()
    # keys are kept: with replayed values in the store, others may not have begun this call
    nonces_by_rank = ranks.all_gather("secret/drawn", own_nonce, keep=True)
    # whatever is in the store, proofs must answer this rank's nonce
    nonces_by_rank[rank] = own_nonce
    nonces = "\n".join(nonces_by_rank)
    proof = secret.proof("rank", rank, context_text, nonces).hex()
    proofs = ranks.all_gather("secret/proof", proof, keep=True)
    wrong = [
        name
        for r, (name, reply) in enumerate(zip(names, proofs, strict=True))
        if r != rank
        and not secret.is_valid_proof(_from_hex(reply), "rank", r, context_text, nonces)
    ]
    if not wrong:
        return
    remedy = "give every node the same --secret-file"
    if len(wrong) > 1 and len(wrong) == len(names) - 1:
        raise AuthenticationError(
            f"device {names[rank]!r} has another secret than the other devices; {remedy}"
        )
    raise AuthenticationError(
        f"{'device' if len(wrong) == 1 else 'devices'} {listed(wrong)} cannot prove the secret of "
        f"device {names[rank]!r}; {remedy}, and check which processes reach the store"
    )


def authenticate_client(
    connection: socket.socket, secret: Secret, client: str, server: str, context_text: str
) -> bool:
    """Connecting side: prove the secret after the other side has proved it."""
    own_nonce = nonce()
    connection.sendall(own_nonce)
    reply = _receive_exactly(connection, NONCE_BYTES + PROOF_BYTES)
    their_nonce, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
    context = (client, server, context_text, own_nonce, their_nonce)
    if not secret.is_valid_proof(proof, "server", *context):
        return False
    connection.sendall(secret.proof("client", *context))
    return True


def authenticate_server(
    connection: socket.socket, secret: Secret, client: str, server: str, context_text: str
) -> bool:
    """Accepting side; counterpart of `authenticate_client`."""
    their_nonce, own_nonce = _receive_exactly(connection, NONCE_BYTES), nonce()
    context = (client, server, context_text, their_nonce, own_nonce)
    connection.sendall(own_nonce + secret.proof("server", *context))
    return secret.is_valid_proof(_receive_exactly(connection, PROOF_BYTES), "client", *context)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Bytes from the peer; one that closes early has neither proved nor failed."""
    received = receive_at_most(connection, size)
    if len(received) < size:
        raise ConnectionResetError("it closed the connection")
    return received


def receive_at_most(connection: socket.socket, size: int) -> bytes:
    """Bytes from the peer; fewer only if it closes the connection."""
    received = b""
    # with a timeout, the socket returns what has arrived
    while len(received) < size and (part := connection.recv(size - len(received))):
        received += part
    return received


def _from_hex(text: str) -> bytes:
    """Bytes of hexadecimal text; empty for other text."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
