"""Graphs whose products work in their own memory (`torch_ops/models/_capture.py`)."""

import pytest
import torch

from torch_ops.models._capture import own_stream, pool_bytes

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


def test_a_workspace_lies_in_the_pool_of_its_graphs() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(16, 16, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(32)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.mm(x, x)
    owned, graphs = [own_stream(device) for _ in range(3)], [torch.cuda.CUDAGraph() for _ in range(3)]
    assert len({each.cuda_stream for each in (*streams, *(own.stream for own in owned))}) == 35
    for own, graph in zip(owned, graphs, strict=True):
        with torch.cuda.graph(graph, pool=own.pool, stream=own.stream):
            torch.mm(x, x)
        # More than a segment of small tensors.
        assert pool_bytes(own.pool) >= 4 * 2**20
