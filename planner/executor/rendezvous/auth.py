"""Authentication: ranks prove the run's secret to each other, in the store and on each connection.

The store itself has no access control: anyone who reaches its port can read and write. Its content
is therefore no proof; a proof answers a nonce drawn by its reader.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from planner.executor.rendezvous.secret import NONCE_BYTES, PROOF_BYTES, Secret, nonce

if TYPE_CHECKING:
    from planner.executor.rendezvous.process_group import ProcessGroup

MAX_NAMES = 8


class AuthenticationError(ValueError):
    """A rank does not know the secret."""


def authenticate_all(ranks: ProcessGroup, about: str) -> None:
    """Prove the secret to all ranks and verify theirs; a collective call."""
    secret, rank, names = ranks.secret, ranks.rank, ranks.names
    assert secret is not None
    own = nonce().hex()
    drawn = ranks.all_gather("secret/drawn", own)
    # whatever is in the store, proofs must answer this rank's nonce
    drawn[rank] = own
    nonces = "\n".join(drawn)
    proof = secret.proof("rank", rank, about, nonces).hex()
    proofs = ranks.all_gather("secret/proof", proof)
    wrong = [
        name
        for r, (name, answer) in enumerate(zip(names, proofs, strict=True))
        if r != rank and not secret.proves(_bytes(answer), "rank", r, about, nonces)
    ]
    if not wrong:
        return
    remedy = "give every node the same --secret-file"
    if len(wrong) > 1 and len(wrong) == len(names) - 1:
        raise AuthenticationError(
            f"device {names[rank]!r} has another secret than the other devices; {remedy}"
        )
    who = ", ".join(map(repr, wrong[:MAX_NAMES])) + (", ..." if len(wrong) > MAX_NAMES else "")
    raise AuthenticationError(
        f"device {who} does not prove to know the secret of device {names[rank]!r}; {remedy}, and "
        "see who else reaches the store"
    )


def authenticate_client(
    connection: socket.socket, secret: Secret, client: str, server: str, about: str
) -> bool:
    """Connecting side: prove the secret after the other side has proved it."""
    own = nonce()
    connection.sendall(own)
    answer = _all_of(connection, NONCE_BYTES + PROOF_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    context = (client, server, about, own, theirs)
    if not secret.proves(proof, "server", *context):
        return False
    connection.sendall(secret.proof("client", *context))
    return True


def authenticate_server(
    connection: socket.socket, secret: Secret, client: str, server: str, about: str
) -> bool:
    """Accepting side; counterpart of `authenticate_client`."""
    theirs, own = _all_of(connection, NONCE_BYTES), nonce()
    context = (client, server, about, theirs, own)
    connection.sendall(own + secret.proof("server", *context))
    return secret.proves(_all_of(connection, PROOF_BYTES), "client", *context)


def _all_of(connection: socket.socket, size: int) -> bytes:
    """Bytes from the peer; one that closes early has neither proved nor failed."""
    received = connection.recv(size, socket.MSG_WAITALL)
    if len(received) < size:
        raise ConnectionResetError("it closed the connection")
    return received


def _bytes(text: str) -> bytes:
    """Bytes of hexadecimal text; empty for other text."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
