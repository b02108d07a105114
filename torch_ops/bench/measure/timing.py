"""How long a call takes, and how much memory.

On a GPU: device time, the median over replays of a CUDA graph that holds several calls. A call that cannot be captured
is timed between two events. On the CPU: wall time. Implementations are timed in rounds of balanced order, so that
clocks and temperature treat all of them alike.
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

Work = Callable[[], object]

REPLAY_MS = 2.0
ROUND_MS = 60.0
CPU_ROUND_MS = 30.0
MAX_CALLS_IN_GRAPH = 128
MIN_SAMPLES, MAX_SAMPLES = 5, 100
FLUSH_BYTES = 2**30
WARM_UP_SECONDS = 1.5


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Timer:
    """`sample()` is one round's figure, milliseconds for one call; `calls` must live as long.

    A captured graph reads the tensors that its calls hold, and does not keep them.
    """

    kind: str
    sample: Callable[[], float]
    calls: Sequence[Work] = ()


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of so many implementations: each has every place, and follows every other, equally often.

    A call that heats the GPU slows down the next call. E. J. Williams, Experimental designs balanced for the estimation
    of residual effects of treatments, 1949: as many orders as implementations, twice as many of an odd number.
    """
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(count)]
    orders = [[(index + turn) % count for index in zigzag] for turn in range(count)]
    return orders if count % 2 == 0 else [*orders, *(order[::-1] for order in orders)]


def whole_cycles(rounds: int, count: int) -> int:
    """`rounds`, or, where all of `balanced_orders` have had their turn, as many more as end the cycle begun."""
    cycle = len(balanced_orders(count))
    return rounds if rounds <= cycle or not cycle else -(-rounds // cycle) * cycle


def warm_up(timers: Iterable[Timer], seconds: float) -> None:
    """Untimed turns for so long: a GPU at rest begins a seventh too fast, and then is too slow for a while."""
    end = time.perf_counter() + seconds
    for timer in itertools.cycle(timers):
        if time.perf_counter() >= end:
            return
        timer.sample()


def interleave(
    timers: dict[str, Timer], rounds: int, on_sample: Callable[[str], None] = lambda name: None
) -> dict[str, tuple[float, ...]]:
    """Every timer in every round, in the orders of `balanced_orders`; so many rounds, to `whole_cycles`."""
    names = list(timers)
    figures: dict[str, list[float]] = {name: [] for name in names}
    orders = itertools.cycle(balanced_orders(len(names)))
    for order in itertools.islice(orders, whole_cycles(rounds, len(names))):
        for name in (names[index] for index in order):
            on_sample(name)
            figures[name].append(timers[name].sample())
    return {name: tuple(values) for name, values in figures.items()}


@contextlib.contextmanager
def on_timing_stream(device: torch.device) -> Iterator[None]:
    """Where to run the forward of a backward that will be timed.

    Autograd runs a backward on its forward's stream, and the default stream cannot be captured.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def make_timer(calls: Sequence[Work], device: torch.device, briefly: bool = False, wall: bool = False) -> Timer:
    """A timer of one call; several `calls` do the same on inputs of their own and take turns.

    `briefly`, a sample is no median, but the mean of one replay's calls, or a single call. `wall` times a call from a
    device at rest until it is again; a CPU knows no other time.
    """
    if wall or device.type != "cuda":
        calls[0]()
        taken = itertools.cycle(calls)
        return Timer("wall", lambda: call_ms(next(taken), device) if briefly else _wall_ms(calls, device), calls)
    stream = _stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        estimate = _between_events(lambda: [calls[0]() for _ in range(MIN_SAMPLES)]) / MIN_SAMPLES
    captured = _capture(calls, estimate, stream)
    if captured is None:
        samples = 1 if briefly else _samples(estimate)
        return Timer("events", lambda: _events_ms(calls, samples, stream), calls)
    graph, calls_per_replay = captured
    replay_ms = _replay_ms if briefly else _graph_ms
    return Timer("graph", lambda: replay_ms(graph, stream) / calls_per_replay, calls)


def peak_bytes(call: Work, device: torch.device) -> int | None:
    """Device memory that one call asks for at its peak, results included; None on the CPU.

    Not what it was given: of a large block that lay ready the allocator hands out up to 1 MiB more.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before


def sets_to_outgrow_cache(bytes_of_one: int, device: torch.device) -> int:
    """How many input sets to take turns with, so that each has left the L2 cache when it is due."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(32, max(2, math.ceil(3 * cache / max(bytes_of_one, 1))))


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@lru_cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def _between_events(work: Work) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _capture(
    calls: Sequence[Work], estimate: float, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, int] | None:
    """A graph of enough calls to dwarf the cost of its launch, and their number."""
    wanted = min(math.ceil(REPLAY_MS / max(estimate, 1e-3)), MAX_CALLS_IN_GRAPH)
    calls_per_replay = math.ceil(wanted / len(calls)) * len(calls)
    graph = torch.cuda.CUDAGraph()
    result: object = None
    # A capture that fails leaves its stream current; the outer context puts the old one back.
    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(graph, stream=stream):
                for index in range(calls_per_replay):
                    result = calls[index % len(calls)]()
            if not _replay_writes(graph, result):
                return None
        except Exception:
            # Whatever a graph may not hold: the call is timed between events instead.
            torch.cuda.synchronize(stream.device)
            return None
    return graph, calls_per_replay


def _replay_writes(graph: torch.cuda.CUDAGraph, result: object) -> bool:
    """Whether the graph holds the work: a launch on a stream of its own would leave it empty."""
    tensors = result if isinstance(result, tuple) else (result,)
    outputs = [each for each in tensors if isinstance(each, torch.Tensor)]
    for output in outputs:
        output.fill_(torch.nan)
    graph.replay()
    return bool(outputs) and not any(output.isnan().any().item() for output in outputs)


def _graph_ms(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    with torch.cuda.stream(stream):
        graph.replay()
        once = _between_events(graph.replay)
        return statistics.median(_between_events(graph.replay) for _ in range(_samples(once)))


def _replay_ms(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    with torch.cuda.stream(stream):
        return _between_events(graph.replay)


def _events_ms(calls: Sequence[Work], samples: int, stream: torch.cuda.Stream) -> float:
    flush = _flush_buffer(stream.device)
    times = []
    with torch.cuda.stream(stream):
        for index in range(samples):
            # While the device writes this, the host gets ahead: launches stay out of the figure.
            flush.zero_()
            times.append(_between_events(calls[index % len(calls)]))
    return statistics.median(times)


def _samples(ms: float) -> int:
    return max(MIN_SAMPLES, min(MAX_SAMPLES, math.ceil(ROUND_MS / max(ms, 1e-3))))


def _wall_ms(calls: Sequence[Work], device: torch.device) -> float:
    times: list[float] = []
    while len(times) < MIN_SAMPLES and sum(times) < 4 * CPU_ROUND_MS or sum(times) < CPU_ROUND_MS:
        times.append(call_ms(calls[len(times) % len(calls)], device))
    return statistics.median(times)


def call_ms(call: Work, device: torch.device) -> float:
    """Wall time of one call, from a device at rest until it is again."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    elapsed = time.perf_counter() - start
    del result
    return elapsed * 1e3
