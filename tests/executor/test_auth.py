"""Who takes part in a run: whoever knows its secret, and nobody else."""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.cli.main import main
from planner.executor.fault_tolerance.shutdown import FAILED, REFUSED
from planner.executor.rendezvous import connect as opening
from planner.executor.rendezvous.address import (
    INTERFACE,
    REACHED_KEY,
    own_address,
    publish_store_address,
    reachable_address,
    require_nccl_interface,
)
from planner.executor.rendezvous.auth import (
    AuthenticationError,
    authenticate_all,
    authenticate_client,
    authenticate_server,
)
from planner.executor.rendezvous.connect import HELLO, MAGIC, Listener, connections_to
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.rendezvous.secret import (
    NONCE_BYTES,
    PROOF_BYTES,
    SECRET_FILE,
    Secret,
    SecretError,
    make_secret,
    nonce,
)
from planner.executor.transport.connections import (
    ChannelKind,
    ConnectionLost,
    receive_into,
    send_all,
)
from planner.executor.transport.store import (
    BIND,
    PortTakenError,
    StoreAddress,
    StoreMissingError,
    serve_store,
)
from planner.training_plan.file import save_plan
from tests.conftest import make_plan, tiny_workload
from tests.executor.faults import Started, saved
from tests.executor.forks import losses_by_step

KNOWN, OTHER = Secret(b"k" * 32), Secret(b"o" * 32)
ENDS = ("a", "b", "ring 4")
UNIX_SOCKETS = sys.platform == "linux"
needs_near = pytest.mark.skipif(not UNIX_SOCKETS, reason="this system has no names of Unix sockets")


def test_a_secret_is_in_a_file_of_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which nobody else may read, with enough in it; the environment may name it."""
    monkeypatch.delenv(SECRET_FILE, raising=False)
    assert Secret.from_environment() is None
    path = make_secret(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = Secret.from_file(path)
    assert len(found.key) == 2 * NONCE_BYTES and found.key.decode() not in repr(found)
    with pytest.raises(FileExistsError):
        make_secret(tmp_path)
    monkeypatch.setenv(SECRET_FILE, str(path))
    assert Secret.from_environment() == found
    other = tmp_path / "other"
    other.write_text(" a secret of sixteen \n")
    other.chmod(0o400)
    assert Secret.from_environment(other) == Secret(b"a secret of sixteen")
    for mode in (0o640, 0o604, 0o620):
        other.chmod(mode)
        with pytest.raises(SecretError, match=f"others may read or write it .mode {mode:04o}"):
            Secret.from_file(other)
    other.chmod(0o600)
    for text in ("", "too short\n", "x" * 5000):
        other.write_text(text)
        with pytest.raises(SecretError, match="must hold 16 to 4096 bytes"):
            Secret.from_file(other)
    with pytest.raises(SecretError, match="cannot be read"):
        Secret.from_file(tmp_path / "none")


def test_proofs_are_of_what_is_said() -> None:
    """Of each part by itself, and of nothing without the secret."""
    proof = KNOWN.proof("ab", "c", b"\x00")
    assert KNOWN.is_valid_proof(proof, "ab", "c", b"\x00")
    assert not KNOWN.is_valid_proof(proof, "a", "bc", b"\x00")
    assert not KNOWN.is_valid_proof(proof, "ab", "c", b"\x00", "")
    assert not KNOWN.is_valid_proof(b"", "ab", "c", b"\x00")
    assert not OTHER.is_valid_proof(proof, "ab", "c", b"\x00")
    assert nonce() != nonce()


class Overheard(socket.socket):
    """Keeps what is sent."""

    sent: list[bytes]

    def sendall(self, data: Any, *flags: int) -> None:
        self.sent.append(bytes(data))
        super().sendall(data, *flags)


def pair() -> tuple[Overheard, socket.socket]:
    """Two ends with a limit on waiting."""
    one, other = socket.socketpair()
    near = Overheard(fileno=one.detach())
    near.sent = []
    for end in (near, other):
        end.settimeout(10.0)
    return near, other


def shaken(
    near: socket.socket, far: socket.socket, *known: Secret, ends: Sequence[str] = ENDS
) -> tuple[bool, bool]:
    """What both ends say of each other."""
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(authenticate_server, far, known[1], *ENDS)
        try:
            mine = authenticate_client(near, known[0], *ends)
        except OSError:
            mine = False
        near.close()
        try:
            return mine, said.result()
        except OSError:
            return mine, False


def test_both_ends_prove_it() -> None:
    """And neither believes one that knows another secret, or means another connection."""
    assert shaken(*pair(), KNOWN, KNOWN) == (True, True)
    assert shaken(*pair(), OTHER, KNOWN) == (False, False)
    assert shaken(*pair(), KNOWN, OTHER) == (False, False)
    for ends in (("c", "b", "ring 4"), ("a", "c", "ring 4"), ("a", "b", "ring 5")):
        assert shaken(*pair(), KNOWN, KNOWN, ends=ends) == (False, False)


def test_what_was_overheard_opens_nothing() -> None:
    """All that a client has sent, sent again; and a server's proof as a client's."""
    near, far = pair()
    assert shaken(near, far, KNOWN, KNOWN) == (True, True)
    again, far = pair()
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(authenticate_server, far, KNOWN, *ENDS)
        for part in near.sent:
            again.sendall(part)
        assert said.result() is False
    near, far = pair()
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(authenticate_server, far, KNOWN, *ENDS)
        near.sendall(nonce())
        heard = near.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        near.sendall(heard[NONCE_BYTES:])
        assert said.result() is False


def threads(world: int, secrets: Sequence[Secret | None]) -> list[RankGroup]:
    """Ranks of one process, on one store."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    names = tuple("abcdef"[:world])
    return [RankGroup(r, world, store, names, secret=secrets[r]) for r in range(world)]


def proven(secrets: Sequence[Secret]) -> list[str]:
    """What each rank says, empty where it is content."""

    def one(ranks: RankGroup) -> str:
        try:
            authenticate_all(ranks, "plan")
        except AuthenticationError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(one, threads(len(secrets), secrets)))


def test_all_prove_it_in_the_store() -> None:
    """Who does not is named by all others, and by itself."""
    assert proven([KNOWN] * 3) == [""] * 3
    said = proven([KNOWN, OTHER, KNOWN, KNOWN])
    for rank, name in ((0, "a"), (2, "c"), (3, "d")):
        assert said[rank].startswith(
            f"device 'b' cannot prove the secret of device '{name}'; give every node"
        )
    assert said[1].startswith("device 'b' has another secret than the other devices; give every")
    assert "device 'b' cannot prove" in proven([KNOWN, OTHER])[0]


def test_a_proof_in_the_store_is_good_for_one_run() -> None:
    """One that was read there is none the next time."""
    ranks = threads(2, [KNOWN, KNOWN])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: authenticate_all(one, "plan"), ranks))
    keys = ("secret/drawn/1", "secret/proof/1")
    first = {key: ranks[0].store.get(key).decode() for key in keys}
    later = threads(2, [KNOWN, None])[0]
    for key, value in first.items():
        later.store.set(key, value)
    with pytest.raises(AuthenticationError, match="device 'b' cannot prove"):
        authenticate_all(later, "plan")
    for text in ("", "no hexadecimal", "00"):
        later = threads(2, [KNOWN, None])[0]
        for key in keys:
            later.store.set(key, text)
        with pytest.raises(AuthenticationError, match="device 'b' cannot prove"):
            authenticate_all(later, "plan")


def opened(ranks: RankGroup) -> dict[tuple[ChannelKind, int], str]:
    """Connections to all others, closed again; names at their other ends."""
    wanted = [
        (ChannelKind.PIPELINE, other) for other in range(ranks.world_size) if other != ranks.rank
    ]
    with connections_to(ranks, wanted, "test") as found:
        return {asked: connection.name for asked, connection in found.items()}


def test_connections_are_of_those_who_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret changes nothing for them; another one opens none, and the line says whose it is."""
    monkeypatch.setattr(opening, "CONNECT_S", 0.5)
    for secret in (None, KNOWN):
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(opened, threads(3, [secret] * 3)))
        assert found[0] == {
            (ChannelKind.PIPELINE, 1): "b",
            (ChannelKind.PIPELINE, 2): "c",
        }
    said = []
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(opened, ranks) for ranks in threads(2, [KNOWN, OTHER])]:
            with pytest.raises(ConnectionLost) as error:
                one.result()
            said.append(str(error.value))
    assert (
        "the process that answers as device 'b' at" in said[0]
        and "does not have the secret" in said[0]
    )
    assert "device 'a' did not connect to 'b'" in said[1]
    last = "this machine" if UNIX_SOCKETS else "127.0.0.1"
    assert f"1 others were refused, the last from {last}" in said[1]


def family(addresses: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Of the connections between ranks at these addresses; a byte goes each way."""
    here = threading.local()
    monkeypatch.setattr(opening, "own_address", lambda: here.address)

    def one(ranks: RankGroup) -> set[int]:
        here.address = addresses[ranks.rank]
        wanted = [
            (ChannelKind.STATE, other) for other in range(ranks.world_size) if other != ranks.rank
        ]
        with connections_to(ranks, wanted, "test") as found:
            for connection in found.values():
                send_all(connection, memoryview(bytes([ranks.rank])))
            for (_, other), connection in found.items():
                came = bytearray(1)
                receive_into(connection, memoryview(came))
                assert came[0] == other
            return {connection.family for connection in found.values()}

    with ThreadPoolExecutor(len(addresses)) as pool:
        ranks = threads(len(addresses), [KNOWN] * len(addresses))
        return set().union(*pool.map(one, ranks))


@needs_near
def test_ranks_at_one_address_connect_without_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it where addresses differ, or where the same one is another machine's."""
    assert family(["127.0.0.1"] * 3, monkeypatch) == {socket.AF_UNIX}
    assert family(["127.0.0.1", "127.0.0.2"], monkeypatch) == {socket.AF_INET}
    listen = opening._listen

    def elsewhere(host: str, backlog: int) -> tuple[list[socket.socket], str]:
        servers, told = listen(host, backlog)
        servers.pop().close()
        return servers, told

    with monkeypatch.context() as here:
        here.setattr(opening, "_listen", elsewhere)
        assert family(["127.0.0.1"] * 2, here) == {socket.AF_INET}
    monkeypatch.setenv(opening.UNIX_SOCKETS, "0")
    assert family(["127.0.0.1"] * 2, monkeypatch) == {socket.AF_INET}


@needs_near
@pytest.mark.parametrize("step", ["make", "bind", "listen", "connect"])
def test_where_unix_sockets_are_closed_ranks_take_the_network(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the system's rule forbids of them; nothing is left open."""

    class Forbidden(socket.socket):
        def __init__(self, family: int = -1, *more: Any, **named: Any) -> None:
            super().__init__(family, *more, **named)
            if step == "make":
                self._forbid()

        def _forbid(self) -> None:
            if self.family == socket.AF_UNIX:
                self.close()
                raise PermissionError(1, "Operation not permitted")

        def bind(self, *what: Any) -> None:
            if step == "bind":
                self._forbid()
            super().bind(*what)

        def listen(self, *what: Any) -> None:
            if step == "listen":
                self._forbid()
            super().listen(*what)

        def connect(self, *what: Any) -> None:
            if step == "connect":
                self._forbid()
            super().connect(*what)

    monkeypatch.setattr(socket, "socket", Forbidden)
    assert family(["127.0.0.1"] * 3, monkeypatch) == {socket.AF_INET}


@needs_near
def test_a_crowd_at_the_unix_socket_leaves_the_port() -> None:
    """Where no more may wait there."""
    (port, near), told = opening._listen("127.0.0.1", 1)
    with port, near, ExitStack() as held:
        with pytest.raises(BlockingIOError):
            while True:
                one = held.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect("\0" + told.split()[2])
        assert (
            held.enter_context(opening._connect_socket(told, told, 60.0)).family == socket.AF_INET
        )


@needs_near
def test_another_user_of_the_machine_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it listens nor where it connects; ranks of other users take the network."""
    ends = threading.local()
    monkeypatch.setattr(os, "geteuid", lambda: ends.user)
    servers, told = opening._listen("127.0.0.1", 8)
    with servers[0], servers[1], ThreadPoolExecutor(1) as pool:
        ends.user = os.getuid() + 1
        with opening._connect_socket(told, told, 60.0) as opened:
            assert opened.family == socket.AF_INET
        asked, ranks = (ChannelKind.PIPELINE, 1), threads(2, [None, None])[0]
        door = Listener(servers, ranks, {asked}, "test")

        def taken() -> None:
            ends.user = os.getuid() + 1
            door.accept_all(120.0)

        done = pool.submit(taken)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("\0" + told.split()[2])
            assert stranger.recv(1) == b""
        with socket.create_connection(servers[0].getsockname()) as client:
            client.sendall(HELLO.pack(MAGIC, *asked))
            done.result()
        (connection,) = door.accepted.values()
        assert connection.family == socket.AF_INET
        assert "the last from " in door.rejections
        connection.close()


def outer_address() -> str:
    """Of this machine, not for itself alone; empty: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing, it only chooses the way
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
    return "" if address.startswith("127.") else address


@pytest.mark.skipif(not outer_address(), reason="this machine has no network")
def test_some_of_one_machine_and_one_of_another(tmp_path: Path) -> None:
    """A rank whose neighbours are all near, and one with neighbours of both kinds."""
    path = saved(make_plan([[0, 1, 2, 3]]), tmp_path / "plan.json")
    words = ["-m", "planner.executor", str(path), "--steps", "2", "--events"]
    with Started(tmp_path) as run:
        for rank, address in enumerate(["127.0.0.1"] * 3 + [outer_address()]):
            run.start(str(rank), str(rank), words, "--bind", address)
        assert set(run.codes("0123").values()) == {0}


@pytest.mark.parametrize("near", [False, pytest.param(True, marks=needs_near)])
@pytest.mark.parametrize("secret", [None, KNOWN])
def test_a_stranger_holds_up_nobody(
    secret: Secret | None, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says nothing, one that says what is wrong, one that comes twice."""
    monkeypatch.setattr(opening, "CONNECT_S", 600.0)  # on a busy machine as on an idle one
    ranks = threads(2, [secret, secret])[0]
    asked = (ChannelKind.PIPELINE, 1)
    with ThreadPoolExecutor(1) as pool, ExitStack() as held:
        servers, told = opening._listen("127.0.0.1", 8)
        for server in servers:
            held.enter_context(server)

        def knock() -> socket.socket:
            if near:
                one = socket.socket(socket.AF_UNIX)
                one.connect("\0" + told.split()[2])
                return one
            return socket.create_connection(servers[0].getsockname())

        door = Listener(servers, ranks, {asked}, "test")
        opened = pool.submit(door.accept_all, 120.0)
        strangers = [knock() for _ in range(4)]
        strangers[1].sendall(b"GET / HTTP/1.0\r\n\r\n")
        strangers[2].sendall(HELLO.pack(MAGIC, ChannelKind.STATE, 1))
        strangers[3].sendall(HELLO.pack(MAGIC, 77, 1))
        if secret is not None:
            strangers.append(knock())
            strangers[4].sendall(HELLO.pack(MAGIC, ChannelKind.PIPELINE, 1) + bytes(200))
        client = knock()
        client.settimeout(60.0)
        client.sendall(HELLO.pack(MAGIC, ChannelKind.PIPELINE, 1))
        if secret is not None:
            assert authenticate_client(client, secret, "b", "a", "test 0")
        opened.result()
        assert list(door.accepted) == [asked]
        # the silent one is still waited for
        strangers[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[0].recv(1)
        for one in (*strangers, client, *door.accepted.values()):
            one.close()


def reaches(address: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_store_listens_on_one_address() -> None:
    """And not on all that the node has, unless it is told to."""
    store = serve_store("127.0.0.1", 0)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert reaches("127.0.0.1", store.port) and not reaches("127.0.0.2", store.port)
    with pytest.raises(PortTakenError, match="cannot be served here"):
        serve_store("127.0.0.1", store.port)
    everywhere = serve_store("0.0.0.0", 0)
    assert reaches("127.0.0.2", everywhere.port)


def test_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the remedy; also for a name that means this machine to itself alone."""
    with pytest.raises(ValueError, match=r"'192.0.2.1' .* is no address of this node .* --bind"):
        serve_store("192.0.2.1", 0)

    def looked_up(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]

    with pytest.raises(ValueError, match=r"no address of this node .* in MASTER_ADDR everywhere"):
        StoreAddress("192.0.2.1", 29500, served_by_launcher=False).connect(1.0, serve=True)
    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    with pytest.raises(ValueError, match=r"'oregon' \(127.0.1.1\) is no address of this node"):
        serve_store("oregon", 0)


def test_where_ranks_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the address that was named, unless that stands for all."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv(BIND, "127.0.0.3")
    assert own_address() == "127.0.0.3"
    assert StoreAddress.from_environment().bind == "127.0.0.3"
    monkeypatch.setenv(BIND, "0.0.0.0")
    assert own_address() == "127.0.0.1"


def test_a_name_that_is_loopback_on_its_own_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks there listen where others reach the store, if that is an address of the node."""
    monkeypatch.delenv(BIND, raising=False)
    monkeypatch.delenv(INTERFACE, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = serve_store("127.0.0.1", 0)
    for rank in range(3):
        publish_store_address(store, rank)
    assert reachable_address(store, 3) == "127.0.0.1"
    for told, wanted in (
        (("", "127.0.0.5", "127.0.0.6"), "127.0.0.5"),
        # through what translates addresses, and by what is none
        (("", "192.0.2.1", "127.0.0.5"), "127.0.0.5"),
        (("192.0.2.1", "2001:db8::1", ""), "127.0.0.1"),
        (("0.0.0.0", "nothing", ""), "127.0.0.1"),
    ):
        for rank, address in enumerate(told):
            store.set(f"{REACHED_KEY}/{rank}", address)
        assert reachable_address(store, 3) == wanted
    store.set(f"{REACHED_KEY}/0", "127.0.0.5")
    monkeypatch.setenv(BIND, "127.0.0.3")
    assert reachable_address(store, 3) == "127.0.0.3"


def test_a_store_that_is_not_there_is_waited_for_as_long_as_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked for at even intervals; a name without an address is said, and may come late."""
    tried: list[float] = []
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def refused(*_: object, timeout: float) -> socket.socket:
        tried.append(now[0])
        now[0] += 0.01
        raise ConnectionRefusedError(111, "Connection refused")

    def unknown(*_: object, timeout: float) -> socket.socket:
        now[0] += 0.01
        raise socket.gaierror(-2, "Name or service not known")

    there = StoreAddress("nohost.invalid", 29500, served_by_launcher=True)
    monkeypatch.setattr(socket, "create_connection", refused)
    with pytest.raises(StoreMissingError, match=r"nohost.invalid:29500 did not answer within 40 s"):
        there.connect(40.0)
    assert 139.0 < now[0] <= 140.0 and len(tried) > 100
    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(StoreMissingError, match=r"within 5 s .Name or service not known."):
        there.connect(5.0)
    assert now[0] <= 146.0


def test_what_the_environment_says_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both variables, each with its value."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match=r"MASTER_ADDR and MASTER_PORT .* found '' and '29500'"):
        StoreAddress.from_environment()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for port in ("", "abc", "0", "65536", "-1", "²"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ValueError, match=f"from 1 to 65535, found '127.0.0.1' and '{port}'"):
            StoreAddress.from_environment()


@pytest.mark.parametrize(
    "what",
    [
        "wrong",
        pytest.param("missing", marks=pytest.mark.slow),
        pytest.param("readable", marks=pytest.mark.slow),
    ],
)
def test_a_rank_without_the_secret_ends_the_run(what: str, tmp_path: Path) -> None:
    """Within seconds; all say the same of it, and name the device or its file."""
    path = saved(make_plan([[0, 1]]), tmp_path / "plan.json")
    (tmp_path / "other").mkdir()
    good, bad = make_secret(tmp_path), make_secret(tmp_path / "other")
    if what == "readable":
        bad.write_text(good.read_text())
        bad.chmod(0o644)
    words = ["-m", "planner.executor", str(path), "--steps", "3", "--events"]
    given = {
        "wrong": ["--secret-file", str(bad)],
        "missing": [],
        "readable": ["--secret-file", str(bad)],
    }[what]
    with Started(tmp_path) as run:
        run.environment.pop(SECRET_FILE, None)
        run.start("0", "0", words, "--secret-file", str(good))
        run.start("1", "1", words, *given)
        codes = run.codes(["0", "1"])
        reasons = [run.reason(name) for name in "01"]
    assert REFUSED in codes.values() and set(codes.values()) <= {REFUSED, FAILED}
    if what == "readable":
        assert codes == {"0": FAILED, "1": REFUSED}
    said = {
        "wrong": "cannot prove the secret of device",
        "missing": "give every node the same --secret-file",
        "readable": "others may read or write it (mode 0644)",
    }[what]
    assert all(said in reason and "device '" in reason for reason in reasons)


@pytest.mark.slow
def test_losses_are_those_without_a_secret(tmp_path: Path) -> None:
    """To the last bit."""
    path = tmp_path / "plan.json"
    save_plan(make_plan([[0, 1], [2, 3]], workload=tiny_workload(batch_samples=8)), path)
    secret = str(make_secret(tmp_path))
    plain, *_ = told = [
        losses_by_step(path, "0123", "--steps", "3", *more)
        for more in ([], ["--secret-file", secret])
    ]
    assert plain[0] == 0 and sorted(plain[1]) == [0, 1, 2]
    assert told[0] == told[1]


def test_a_run_on_this_machine_makes_a_secret_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file of the run, which its processes are told the name of; it is gone afterwards."""
    from planner.executor.launch import local

    path = saved(make_plan([[0, 1]], workload=tiny_workload()), tmp_path / "plan.json")
    found: list[Path] = []

    def run_local(
        command: Sequence[str], names: object, environment: dict[str, str], *_: Any, **__: Any
    ) -> tuple[int, str]:
        found.append(Path(environment[SECRET_FILE]))
        key = Secret.from_file(found[-1]).key.decode()
        assert stat.S_IMODE(found[-1].parent.stat().st_mode) == 0o700
        assert not any(key in word for word in (*command, *environment.values()))
        return FAILED, "enough"

    monkeypatch.setattr(local, "run_local", run_local)
    for _ in range(2):
        assert main(["run", str(path), "--steps", "1"]) == FAILED
    assert found[0] != found[1] and not any(one.exists() for one in found)
    assert SECRET_FILE not in os.environ


def test_threads_of_strangers_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says nothing is given up after a while."""
    monkeypatch.setattr(opening, "CONNECT_S", 0.05)
    ranks = threads(2, [KNOWN, KNOWN])[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        door = Listener([server], ranks, {(ChannelKind.PIPELINE, 1)}, "test")
        before = set(threading.enumerate())
        silent = socket.create_connection(server.getsockname())
        with pytest.raises(TimeoutError):
            door.accept_all(0.2)
        for thread in set(threading.enumerate()) - before:
            thread.join(10.0)
            assert not thread.is_alive()
        assert door.rejections == "; 1 others were refused, the last from 127.0.0.1"
        silent.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say addresses")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("none0", "names 'none0', which this machine does not have, or which has no IPv4"),
        ("lo,none0", "names 'none0', which this machine does not have"),
        ("^docker0", r"names '\^docker0', which is the syntax of NCCL_SOCKET_IFNAME"),
        ("=lo", "names '=lo', which is the syntax of NCCL_SOCKET_IFNAME"),
        ("lo" + "x" * 20, "names 'lox*', which this machine does not have"),
    ],
)
def test_interfaces_that_do_not_exist(
    value: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Refused with those that there are, instead of listening elsewhere."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    monkeypatch.delenv("PLANNER_BIND", raising=False)
    with pytest.raises(ValueError, match=f"GLOO_SOCKET_IFNAME {said}.*; name one of .*lo"):
        own_address()
    monkeypatch.setenv("PLANNER_BIND", "127.0.0.3")
    assert own_address() == "127.0.0.3"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say addresses")
def test_the_first_of_several_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo takes them in turn; ranks listen on one."""
    monkeypatch.delenv("PLANNER_BIND", raising=False)
    for value in ("lo", "lo,lo", " lo , lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
        assert own_address() == "127.0.0.1"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say addresses")
@pytest.mark.parametrize(
    ("value", "fine"),
    [
        *(("", True), ("lo", True), ("=lo", True), ("l", True), ("none0,lo", True)),
        *(("^none0", True), ("^=lo", len(socket.if_nameindex()) > 1)),
        *(("none0", False), ("=l", False), ("=none0,none1", False)),
    ],
)
def test_interfaces_as_nccl_reads_them(
    value: str, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes, whole names and exclusions; one that leaves none is refused."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    if fine:
        require_nccl_interface()
        return
    with pytest.raises(ValueError, match=r"NCCL_SOCKET_IFNAME is .*, which leaves no interface of"):
        require_nccl_interface()
