"""Where a rank computes, as its host sees it: how values cross over, and when operations end.

On a GPU nobody waits for an operation but who needs what it made: messages leave and enter by
copies of their own streams, to and from pinned memory, while the next operation computes. The host
is one operation ahead of the GPU and no further, so that it knows in time when each has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Mark = Any
"""A moment of the computing side, that is maybe still to come."""


class DeviceBackend(Protocol):
    """Memory and time of what computes.

    Attributes
    ----------
    ahead
        Operations that may be begun before the one before them has ended.
    """

    ahead: int

    def begin(self) -> None:
        """A step begins; nothing is under way."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory for a message; safe to be called from any thread."""

    def own(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory where operations compute, for `across` to fill; safe to be called from any thread.

        Operations may use it after `enter`.
        """

    def enter(self, message: Tensor) -> Tensor:
        """What is in host memory or in memory of `own`, for operations begun from now on."""

    def leave(self, made: Tensor) -> Callable[[], Tensor]:
        """What operations begun so far have made, on its way to host memory."""

    def made(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What operations begun so far have made, where it is."""

    def across(self, job: Callable[[], object]) -> None:
        """Do something beside the operations, and wait until it is done; for any thread."""

    def mark(self) -> Mark:
        """When what was begun so far has ended."""

    def at(self, mark: Mark) -> float:
        """Waits for a mark, of this step, and says when it was on the monotonic clock."""


class HostBackend:
    """Operations compute in host memory and have ended when they return."""

    ahead = 0

    def begin(self) -> None:
        """Nothing to do."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `DeviceBackend`."""
        return torch.empty(shape, dtype=dtype)

    def own(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `room`."""
        return self.room(shape, dtype)

    def enter(self, message: Tensor) -> Tensor:
        """The same memory."""
        return message

    def leave(self, made: Tensor) -> Callable[[], Tensor]:
        """The same memory, if it is in one piece."""
        return lambda: made.detach().contiguous()

    def made(self, tensor: Tensor) -> Callable[[], Tensor]:
        """As `leave`."""
        return self.leave(tensor)

    def across(self, job: Callable[[], object]) -> None:
        """At once."""
        job()

    def mark(self) -> float:
        """Now."""
        return time.monotonic()

    def at(self, mark: Mark) -> float:
        """It was then."""
        return float(mark)


HOST: DeviceBackend = HostBackend()


class GpuStreams(Protocol):
    """What is asked of a GPU: streams, events, memory and copies; `CudaStreams` is PyTorch's."""

    def stream(self) -> Any:
        """A new stream."""

    def computing(self) -> Any:
        """The stream that operations are begun on."""

    def wait(self, stream: Any, other: Any) -> None:
        """What a stream is given from now on waits for what another one was given."""

    def event(self, stream: Any, *, timing: bool) -> Any:
        """Behind all that a stream was given."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that copies to and from the GPU do not wait for."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in such memory."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: Any) -> Tensor:
        """Memory of the GPU for a stream."""

    def is_here(self, tensor: Tensor) -> bool:
        """Whether a tensor is in such memory."""

    def on(self, stream: Any, job: Callable[[], object]) -> None:
        """Do something that gives work to a stream; for any thread."""

    def copied_in(self, message: Tensor, stream: Any) -> Tensor:
        """Memory of the GPU that a stream copies pinned memory to."""

    def copy_out(self, there: Tensor, made: Tensor, stream: Any) -> None:
        """A stream copies to pinned memory."""

    def used(self, tensor: Tensor, stream: Any) -> None:
        """Another stream than the one that it was made for uses a tensor from now on."""


class GpuBackend:
    """Operations are begun on a GPU's current stream; copies have a stream for each direction."""

    ahead = 1

    def __init__(self, gpu: GpuStreams) -> None:
        self._gpu = gpu
        self._out, self._into, self._across = gpu.stream(), gpu.stream(), gpu.stream()
        self.begin()

    def begin(self) -> None:
        """Times of a step are counted from here: a GPU's own clock has few digits."""
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_s = time.monotonic()

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned, of the allocator that keeps it from others while a copy reads it."""
        return self._gpu.pinned(shape, dtype)

    def own(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Of the stream that `across` works on, which no operation holds up."""
        return self._gpu.empty(shape, dtype, self._across)

    def enter(self, message: Tensor) -> Tensor:
        """See `DeviceBackend`; operations begun before do not hold it up."""
        gpu, computing = self._gpu, self._gpu.computing()
        if gpu.is_here(message):
            gpu.used(message, computing)
            return message
        if not gpu.is_pinned(message):
            message = self.room(tuple(message.shape), message.dtype).copy_(message)
        here = gpu.copied_in(message, self._into)
        gpu.wait(computing, self._into)
        gpu.used(here, computing)
        return here

    def leave(self, made: Tensor) -> Callable[[], Tensor]:
        """See `DeviceBackend`; operations begun later do not hold it up."""
        made = made.detach().contiguous()
        there = self.room(tuple(made.shape), made.dtype)
        self._gpu.wait(self._out, self._gpu.computing())
        self._gpu.copy_out(there, made, self._out)
        # then it is let go of, though sending takes longer
        self._gpu.used(made, self._out)
        copied = self._gpu.event(self._out, timing=False)

        def ready() -> Tensor:
            copied.synchronize()
            return there

        return ready

    def made(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See `DeviceBackend`; operations begun later do not hold it up."""
        tensor = tensor.detach().contiguous()
        there = self._gpu.event(self._gpu.computing(), timing=False)

        def ready() -> Tensor:
            there.synchronize()
            return tensor

        return ready

    def across(self, job: Callable[[], object]) -> None:
        """See `DeviceBackend`; on a stream of its own."""
        self._gpu.on(self._across, job)
        # a library's own wait only puts streams in order
        self._gpu.event(self._across, timing=False).synchronize()

    def mark(self) -> Mark:
        """An event behind all operations."""
        return self._gpu.event(self._gpu.computing(), timing=True)

    def at(self, mark: Mark) -> float:
        """See `DeviceBackend`."""
        mark.synchronize()
        # the host woke a little later than the step began
        found = self._zero_s + float(self._zero.elapsed_time(mark)) / 1e3
        return min(found, time.monotonic())


class CudaEvent:
    """An event that any thread may wait for.

    A thread's current GPU is the first one until it is told otherwise, and waiting would make a
    context there, which is another rank's.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def synchronize(self) -> None:
        """Wait until it has come."""
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def elapsed_time(self, other: CudaEvent) -> float:
        """Milliseconds from this one to another; both have come."""
        with torch.cuda.device(self._device):
            return float(self._event.elapsed_time(other._event))


class CudaStreams:
    """A GPU by PyTorch's ``torch.cuda``; from now on the current one of this thread."""

    def __init__(self, device: torch.device) -> None:
        # leaving a stream of it sets the thread's GPU to what it was, the first one by default
        torch.cuda.set_device(device)
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        """See `GpuStreams`."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def computing(self) -> torch.cuda.Stream:
        """The thread's current stream of this GPU, whichever GPU is its current one."""
        return torch.cuda.current_stream(self._device)

    def wait(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """See `GpuStreams`."""
        stream.wait_stream(other)

    def event(self, stream: torch.cuda.Stream, *, timing: bool) -> CudaEvent:
        """See `GpuStreams`; of copies, which are awaited by threads, such that these sleep."""
        event = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=timing, blocking=not timing
        )
        event.record(stream)
        return CudaEvent(event, self._device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `GpuStreams`; it waits until copies have read what was let go of."""
        with torch.cuda.device(self._device):
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """See `GpuStreams`."""
        return tensor.is_pinned()

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, stream: torch.cuda.Stream
    ) -> Tensor:
        """See `GpuStreams`; without a stream, another thread's GPU would become the first one."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def is_here(self, tensor: Tensor) -> bool:
        """See `GpuStreams`."""
        return tensor.device == self._device

    def on(self, stream: torch.cuda.Stream, job: Callable[[], object]) -> None:
        """See `GpuStreams`."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            job()

    def copied_in(self, message: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """See `GpuStreams`."""
        with torch.cuda.stream(stream):
            return message.to(self._device, non_blocking=True)

    def copy_out(self, there: Tensor, made: Tensor, stream: torch.cuda.Stream) -> None:
        """See `GpuStreams`."""
        with torch.cuda.stream(stream):
            there.copy_(made, non_blocking=True)

    def used(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """See `GpuStreams`; it is not given to others before that stream is done with it."""
        tensor.record_stream(stream)


def backend_of(device: torch.device) -> DeviceBackend:
    """Of a device."""
    return GpuBackend(CudaStreams(device)) if device.type == "cuda" else HOST
