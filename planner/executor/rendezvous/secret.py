"""A secret shared by the processes of a run, and proofs of it that are valid once.

The secret itself is never sent: the verifier sends a nonce, the prover answers with its HMAC-
SHA256. A proof that was overheard is useless later.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from planner.utils.refusal import Refusal

SECRET_FILE = "PLANNER_SECRET_FILE"
"""Environment variable with the file's name, never the secret itself, which others could read."""
MIN_BYTES, MAX_BYTES = 16, 4096
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
OTHER_USERS = stat.S_IRWXG | stat.S_IRWXO


class SecretError(Refusal):
    """A file without a secret, or readable by others."""


@dataclass(frozen=True)
class Secret:
    """A secret that a process can prove to know."""

    key: bytes = field(repr=False)

    @classmethod
    def from_file(cls, path: str | Path) -> Secret:
        """From a file readable by its owner only; surrounding blanks are ignored."""
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise SecretError(
                f"secret file {path}: cannot be read ({error.strerror}); check path and permissions"
            ) from None
        if mode & OTHER_USERS:
            raise SecretError(
                f"secret file {path}: others may read or write it (mode "
                f"{stat.S_IMODE(mode):04o}); chmod 600 it, and make a new one if others had it"
            )
        key = text.strip()
        if not MIN_BYTES <= len(key) <= MAX_BYTES:
            raise SecretError(
                f"secret file {path}: must hold {MIN_BYTES} to {MAX_BYTES} bytes, found "
                f"{len(key) if len(text) <= MAX_BYTES else 'more'}; make one with: (umask 077; "
                "openssl rand -hex 32 > FILE)"
            )
        return cls(key)

    @classmethod
    def from_environment(cls, path: str | Path | None = None) -> Secret | None:
        """From the named file, else from the one in the environment."""
        given = path or os.environ.get(SECRET_FILE)
        return None if not given else cls.from_file(given)

    def proof(self, *context: object) -> bytes:
        """Proof of the secret, bound to a context."""
        parts = [one if isinstance(one, bytes) else str(one).encode() for one in context]
        # length prefixes make the encoding of parts unambiguous
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self.key, message, "sha256")

    def is_valid_proof(self, proof: bytes, *context: object) -> bool:
        """Whether a proof is valid, in constant time."""
        return hmac.compare_digest(proof, self.proof(*context))


def nonce() -> bytes:
    """A random number that is used once."""
    return secrets.token_bytes(NONCE_BYTES)


def make_secret(folder: Path) -> Path:
    """A new secret in a file readable by its owner only."""
    path = folder / "secret"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(NONCE_BYTES) + "\n")
    return path
