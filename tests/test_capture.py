"""Graphs whose products work in their own memory (`torch_ops/_capture.py`)."""

import pytest
import torch

from torch_ops._capture import ENOUGH_BYTES, own_stream, pool_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.no_interpret]


def test_products_of_a_graph_outlive_the_workspaces_of_their_stream() -> None:
    """Dropped and given back, as by graphs that `torch.compile` makes, they would be no memory at all."""
    device = torch.device("cuda", torch.cuda.current_device())
    # Few results of long sums: they are added up in the workspace.
    x, weight = (torch.randn(64, 2**16, device=device, dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(64, device=device, dtype=torch.bfloat16)
    expected = torch.addmm(bias, x, weight.t())
    own, graph = own_stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=own.pool, stream=own.stream):
        found = torch.addmm(bias, x, weight.t())
    for _ in range(3):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)


def test_streams_that_have_multiplied_are_passed_over() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(16, 16, device=device)
    used = [torch.cuda.Stream(device) for _ in range(3)]
    for stream in used:
        with torch.cuda.stream(stream):
            torch.mm(x, x)
    owned = [own_stream(device) for _ in range(3)]
    assert len({each.cuda_stream for each in used} | {each.stream.cuda_stream for each in owned}) == 6
    assert all(pool_bytes(each.pool) >= ENOUGH_BYTES for each in owned)
