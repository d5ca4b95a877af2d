"""What the executor does on a GPU, on a stand-in whose copies come late and in no hurry."""

from __future__ import annotations

import random
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import make_plan, tiny_workload

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from planner.executor.comm.device_backend import HOST, DeviceBackend, GpuBackend, HostBackend  # noqa: E402
from planner.executor.comm.p2p import ExpectedMessage, Receiver, Sender  # noqa: E402
from planner.executor.comm.p2p_schedule import P2PSchedule  # noqa: E402
from planner.executor.fault_tolerance.error_latch import ErrorLatch  # noqa: E402
from planner.executor.runtime.model_stage import ModelStage  # noqa: E402
from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402
from planner.executor.runtime.pipeline import run_operations  # noqa: E402
from planner.executor.runtime.records import StepRecord  # noqa: E402
from tests.executor.devices import CPU, LONG_S, train_in_threads  # noqa: E402

LATE_S = 0.003
GARBAGE = 1e30


class LateStream:
    """Does what it is given in order, each a little later than it could."""

    def __init__(self, late: Callable[[], float]) -> None:
        self._late = late
        self._lane = ThreadPoolExecutor(1)
        self.last: Future[float] = self.give(lambda: None)
        self.waits: list[LateStream] = []

    def give(self, job: Callable[[], Any]) -> Future[float]:
        """Later."""

        def run() -> float:
            time.sleep(self._late())
            job()
            return time.monotonic()

        self.last = self._lane.submit(run)
        return self.last


class LateEvent:
    """When a stream has done what it was given."""

    def __init__(self, done: Future[float]) -> None:
        self._done = done

    def synchronize(self) -> None:
        """Wait."""
        self._done.result(LONG_S)

    @property
    def moment_s(self) -> float:
        """Monotonic clock."""
        return self._done.result()

    def elapsed_time(self, other: LateEvent) -> float:
        """Milliseconds."""
        assert self._done.done() and other._done.done(), "asked before they were there"
        return 1e3 * (other._done.result() - self._done.result())


class LateGpu:
    """Computes at once, in host memory; copies are late, and their memory holds garbage before.

    What computes waits for copies in where it was told to, and reads garbage elsewhere.
    """

    def __init__(self, seed: int = 0) -> None:
        chance = random.Random(seed)
        self._late = lambda: chance.uniform(0.0, LATE_S)
        self._computes = self.stream()
        self.pins: set[int] = set()
        self.lent: list[tuple[Tensor, Any]] = []
        self.copies = 0

    def stream(self) -> LateStream:
        """See `CudaStreams`."""
        return LateStream(self._late)

    def compute_stream(self) -> LateStream:
        """See `CudaStreams`."""
        return self._computes

    def wait(self, stream: LateStream, other: LateStream) -> None:
        """What computes in the host's own time waits in it."""
        stream.waits.append(other)
        awaited = other.last
        if stream is self._computes:
            awaited.result(LONG_S)
        else:
            stream.give(lambda: awaited.result(LONG_S))

    def event(self, stream: LateStream, *, timing: bool) -> LateEvent:
        """See `CudaStreams`."""
        return LateEvent(stream.give(lambda: None))

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Full of garbage, or of what is in no message."""
        made: Tensor = torch.full(shape, GARBAGE if dtype.is_floating_point else 99, dtype=dtype)
        self.pins.add(made.untyped_storage().data_ptr())
        return made

    def is_pinned(self, tensor: Tensor) -> bool:
        """See `CudaStreams`."""
        return tensor.untyped_storage().data_ptr() in self.pins

    def copy_to_device(self, message: Tensor, stream: LateStream) -> Tensor:
        """See `CudaStreams`."""
        assert self.is_pinned(message), "a copy that the host would wait for"
        here: Tensor = torch.full_like(message, 0)
        stream.give(lambda: here.copy_(message))
        self.copies += 1
        return here

    def copy_to_host(self, there: Tensor, made: Tensor, stream: LateStream) -> None:
        """See `CudaStreams`."""
        assert self.is_pinned(there), "a copy that the host would wait for"
        assert stream.waits.pop() is self._computes and not stream.waits
        # what nobody keeps for the copy others may have overwritten by then
        kept = weakref.ref(made)
        stream.give(lambda: there.copy_(kept()) if kept() is not None else there.fill_(99))
        self.copies += 1

    def record_stream(self, tensor: Tensor, stream: LateStream) -> None:
        """Kept until the stream has done what it was given."""
        self.lent.append((tensor, stream))
        if stream is not self._computes:
            stream.give(lambda: self.lent.remove((tensor, stream)))


def late_backend() -> GpuBackend:
    """With such a GPU, in place of CUDA's."""
    gpu: Any = LateGpu()
    return GpuBackend(gpu)


class Counted(GpuBackend):
    """How many marks were set before others had been looked at, and by how much times are late."""

    def __init__(self, gpu: Any) -> None:
        self.open = self.most = 0
        self.late_s = 0.0
        super().__init__(gpu)

    def record_event(self) -> Any:
        """One of two of an operation."""
        self.open += 1
        self.most = max(self.most, self.open)
        return super().record_event()

    def wait_for_event(self, mark: Any) -> float:
        """Looked at."""
        self.open -= 1
        return super().wait_for_event(mark)

    def begin_step(self) -> None:
        """That mark is looked at by itself; the host may wake long after it."""
        super().begin_step()
        self.open -= 1
        self.late_s = max(self.late_s, self._start_s - self._start_event.moment_s)


def test_what_leaves_is_waited_for_by_who_needs_it_alone() -> None:
    """The computing thread goes on at once; the values are those of when it left."""
    gpu: Any = LateGpu()
    backend: Any = GpuBackend(gpu)
    made = torch.arange(6.0)
    ready = backend.to_host(made.view(2, 3).t())
    assert torch.equal(ready(), torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert torch.equal(HostBackend().to_host(made)(), made)
    backend._d2h_stream.last.result(LONG_S)
    # let go of by all as soon as it is copied, though nobody has asked for it
    ready = backend.to_host(torch.ones(3))
    assert len(gpu.lent) == 1
    backend._d2h_stream.last.result(LONG_S)
    assert not gpu.lent and torch.equal(ready(), torch.ones(3))


def test_what_enters_is_there_before_it_is_used_and_kept_while_it_is() -> None:
    """Unpinned memory is pinned first; memory of the copies' stream is lent to what computes."""
    gpu: Any = LateGpu()
    backend: Any = GpuBackend(gpu)
    for message in (torch.arange(5), backend.host_buffer((5,), torch.float32).fill_(2.5)):
        here = backend.to_device(message)
        assert torch.equal(here, message)
        assert gpu.lent[-1] == (here, gpu.compute_stream())
    assert HOST.to_device(message) is message


def test_marks_are_moments_of_the_monotonic_clock() -> None:
    """In order, and between the host's moments before and after."""
    for backend in (late_backend(), HOST):
        backend.begin_step()
        if isinstance(backend, GpuBackend):
            assert backend._start_s >= backend._start_event.moment_s
        before = time.monotonic()
        marks = [backend.record_event() for _ in range(5)]
        found = [backend.wait_for_event(mark) for mark in marks]
        assert before <= found[0] <= found[-1] <= time.monotonic() + 1e-3
        assert found == sorted(found)


@pytest.mark.parametrize("head", ["last", "first"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_the_same_losses_and_parameters_to_the_last_bit(head: str, precision: str) -> None:
    """However late copies come, in both directions; operations and messages have true times."""
    workload = tiny_workload()
    if precision == "int8":
        workload = workload.with_boundary_codec("int8")
    elif precision == "bf16":
        workload = type(workload).transformer("tiny", workload.architecture, batch_samples=8)
    # one device a stage, whose gradients stay, or two, which average theirs
    plan = make_plan(
        [[0, 1, 2]] if head == "last" else [[0, 1], [3, 2]], workload=workload, head=head
    )
    n = len(plan.cluster)
    want, _, want_losses = train_in_threads(plan, [HOST] * n)
    gpus = [LateGpu(seed) for seed in range(n)]
    backends = [Counted(gpu) for gpu in gpus]
    found, records, losses = train_in_threads(plan, backends)
    assert losses == want_losses and losses[1] < losses[0]
    for one, other in zip(found, want, strict=True):
        assert all(map(torch.equal, one.parameters, other.parameters))
    assert all(gpu.copies > 0 for gpu in gpus)
    ends: dict[tuple[int, int, str, int], dict[str, float]] = {}
    for d, own in enumerate(records):
        for record in own:
            assert [(kind, b) for b, _, kind, _, _ in record.ops] == list(
                plan.schedules[0].order[d]
            )
            times = [t for *_, start, end in record.ops for t in (start, end)]
            assert times == sorted(times)
            for b, kind, source, _, size, sent, got in record.messages:
                known = ends.setdefault((record.step, b, kind, source), {})
                known |= {"sent": sent} if sent is not None else {"got": got}
                assert size > 0
    late_s = max(backend.late_s for backend in backends)
    assert ends and all(each["sent"] - late_s < each["got"] for each in ends.values())


def test_the_host_is_one_operation_ahead_and_no_further() -> None:
    """Two operations have both marks set at most; what was begun is noted while the host waits."""
    plan = make_plan([[0, 1]], workload=tiny_workload(batch_samples=6))
    backends: list[DeviceBackend] = [Counted(LateGpu(d)) for d in range(2)]

    _, records, _ = train_in_threads(plan, backends)
    assert [backend.most for backend in backends if isinstance(backend, Counted)] == [4, 4]
    assert [backend.open for backend in backends if isinstance(backend, Counted)] == [0, 0]
    assert all(
        len(record.ops) == len(plan.schedules[0].order[d])
        for d, own in enumerate(records)
        for record in own
    )


def test_what_was_begun_is_noted_before_the_host_waits_for_a_message() -> None:
    """Word of its end may not wait for a message that may come much later."""
    plan = make_plan([[0, 1]], workload=tiny_workload(batch_samples=1))
    schedule = plan.schedules[0]
    traffic = P2PSchedule(schedule, 0)
    mine, theirs = socket.socketpair()
    error_latch = ErrorLatch()
    model_stage = ModelStage(plan, 0, CPU, OptimizerConfig(), backend=late_backend())
    coming = {1: [ExpectedMessage(0, message) for message in traffic.incoming[1]]}
    receiver = Receiver({1: mine}, coming, model_stage.buffer, error_latch)
    sender = Sender({1: mine}, error_latch, {1: 1e9}, backend=model_stage.backend)
    model_stage.begin(0, schedule)
    first = threading.Event()

    def run() -> None:
        record = StepRecord(0, False)
        how = (model_stage, receiver, sender, 0, record, lambda end: first.set())
        run_operations(traffic, *how)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    # F has ended, and B waits for a gradient that was not sent
    assert first.wait(LONG_S) and thread.is_alive()
    gradient = model_stage.operations.activation_codec.encode_message(
        torch.zeros(model_stage.operations.activation_codec.shape), gradient=True
    )
    theirs.sendall(gradient.numpy().tobytes())
    thread.join(LONG_S)
    assert not thread.is_alive()
    error_latch.check()
    mine.close()
    theirs.close()
