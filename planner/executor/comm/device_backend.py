"""Host or GPU where a rank computes: transfers between both, and when operations end.

On a GPU only the consumer of a result waits for its operation: messages enter and leave by copies
on separate streams, to and from pinned memory, while the next operation computes. The host is one
operation ahead of the GPU and no further, so that it learns in time when each has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Mark = Any
"""A point in the work of the device, possibly still to come."""


class DeviceBackend(Protocol):
    """Memory and time of the device that computes.

    Attributes
    ----------
    max_pending
        Number of operations that may be issued before the previous one has ended.
    """

    max_pending: int

    def begin(self) -> None:
        """Start of a step, when no operation is pending."""

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate host memory for a message; thread-safe."""

    def to_device(self, message: Tensor) -> Tensor:
        """Make a message in host memory available to later operations."""

    def to_host(self, made: Tensor) -> Callable[[], Tensor]:
        """Copy the result of the operations so far to host memory."""

    def mark(self) -> Mark:
        """A mark behind all operations issued so far."""

    def wait_time_s(self, mark: Mark) -> float:
        """Wait for a mark of this step; returns its time on the monotonic clock."""


class HostBackend:
    """Operations compute in host memory and have ended when they return."""

    max_pending = 0

    def begin(self) -> None:
        """Does nothing."""

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `DeviceBackend`."""
        return torch.empty(shape, dtype=dtype)

    def to_device(self, message: Tensor) -> Tensor:
        """Return the same memory."""
        return message

    def to_host(self, made: Tensor) -> Callable[[], Tensor]:
        """Return the same memory, made contiguous."""
        return lambda: made.detach().contiguous()

    def mark(self) -> float:
        """The current time."""
        return time.monotonic()

    def wait_time_s(self, mark: Mark) -> float:
        """The time of the mark."""
        return float(mark)


HOST: DeviceBackend = HostBackend()


class GpuStreams(Protocol):
    """Interface to a GPU: streams, events, memory and copies; implemented by `CudaStreams`."""

    def stream(self) -> Any:
        """Create a stream."""

    def computing(self) -> Any:
        """The stream on which operations are issued."""

    def wait(self, stream: Any, other: Any) -> None:
        """Make later work of one stream wait for earlier work of another."""

    def event(self, stream: Any, *, timing: bool) -> Any:
        """Record an event behind all work of a stream."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate pinned host memory."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in pinned memory."""

    def copied_in(self, message: Tensor, stream: Any) -> Tensor:
        """Copy pinned memory to GPU memory on a stream."""

    def copy_out(self, there: Tensor, made: Tensor, stream: Any) -> None:
        """Copy to pinned memory on a stream."""

    def used(self, tensor: Tensor, stream: Any) -> None:
        """Record that another stream uses a tensor."""


class GpuBackend:
    """Operations run on a GPU's current stream; copies have one stream per direction."""

    max_pending = 1

    def __init__(self, gpu: GpuStreams) -> None:
        self._gpu = gpu
        self._out, self._into = gpu.stream(), gpu.stream()
        self.begin()

    def begin(self) -> None:
        """Start counting a step's time: a GPU's event times have few digits."""
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_s = time.monotonic()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned memory from an allocator that keeps it while a copy reads it."""
        return self._gpu.pinned(shape, dtype)

    def to_device(self, message: Tensor) -> Tensor:
        """See `DeviceBackend`; earlier operations do not delay it."""
        gpu, computing = self._gpu, self._gpu.computing()
        if not gpu.is_pinned(message):
            message = self.host_buffer(tuple(message.shape), message.dtype).copy_(message)
        copied = gpu.copied_in(message, self._into)
        gpu.wait(computing, self._into)
        gpu.used(copied, computing)
        return copied

    def to_host(self, made: Tensor) -> Callable[[], Tensor]:
        """See `DeviceBackend`; later operations do not delay it."""
        made = made.detach().contiguous()
        there = self.host_buffer(tuple(made.shape), made.dtype)
        self._gpu.wait(self._out, self._gpu.computing())
        self._gpu.copy_out(there, made, self._out)
        # free it then, although sending takes longer
        self._gpu.used(made, self._out)
        copied = self._gpu.event(self._out, timing=False)

        def ready() -> Tensor:
            copied.synchronize()
            return there

        return ready

    def mark(self) -> Mark:
        """An event behind all operations."""
        return self._gpu.event(self._gpu.computing(), timing=True)

    def wait_time_s(self, mark: Mark) -> float:
        """See `DeviceBackend`."""
        mark.synchronize()
        # the event precedes the start of the step slightly
        time_s = self._zero_s + float(self._zero.elapsed_time(mark)) / 1e3
        return min(time_s, time.monotonic())


class CudaEvent:
    """An event for which any thread may wait.

    The current GPU of a new thread is the first one; waiting without setting it would create a CUDA
    context there.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def synchronize(self) -> None:
        """Wait for the event."""
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def elapsed_time(self, other: CudaEvent) -> float:
        """Milliseconds between two events that have occurred."""
        with torch.cuda.device(self._device):
            return float(self._event.elapsed_time(other._event))


class CudaStreams:
    """A GPU by ``torch.cuda``; becomes this thread's current one."""

    def __init__(self, device: torch.device) -> None:
        # leaving a stream resets the current GPU of the thread
        torch.cuda.set_device(device)
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        """See `GpuStreams`."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def computing(self) -> torch.cuda.Stream:
        """The thread's current stream of this GPU."""
        return torch.cuda.current_stream(self._device)

    def wait(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """See `GpuStreams`."""
        stream.wait_stream(other)

    def event(self, stream: torch.cuda.Stream, *, timing: bool) -> CudaEvent:
        """See `GpuStreams`; threads that wait for events of copies sleep."""
        event = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=timing, blocking=not timing
        )
        event.record(stream)
        return CudaEvent(event, self._device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `GpuStreams`; waits until pending copies have read freed memory."""
        with torch.cuda.device(self._device):
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """See `GpuStreams`."""
        return tensor.is_pinned()

    def copied_in(self, message: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """See `GpuStreams`."""
        with torch.cuda.stream(stream):
            return message.to(self._device, non_blocking=True)

    def copy_out(self, there: Tensor, made: Tensor, stream: torch.cuda.Stream) -> None:
        """See `GpuStreams`."""
        with torch.cuda.stream(stream):
            there.copy_(made, non_blocking=True)

    def used(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """See `GpuStreams`; the memory is not reused before that stream is done with it."""
        tensor.record_stream(stream)


def backend_of(device: torch.device) -> DeviceBackend:
    """The backend of a device."""
    return GpuBackend(CudaStreams(device)) if device.type == "cuda" else HOST
