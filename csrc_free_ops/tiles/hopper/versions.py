"""Names that differ between Triton 3.6 and 3.9, all of which build the kernels.

A view of a buffer has exactly its bytes: Triton 3.8 takes no other.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

# Public since Triton 3.8.
aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate
# Barrier of all threads of one partition. Triton 3.7 renamed it.
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Triton 3.8 renamed them.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# Launch options. Triton 3.9 asks its ptxas (13.4) for --regAllocOptLevel=2, so that tiles next to wide accumulators
# spill up to 192 bytes a thread. At level 4, the default of ptxas, such tiles spill at most 48.
PTXAS = {"ptx_options": "--regAllocOptLevel=4"} if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else {}


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """View a buffer in shared memory as another dtype, shape and layout. Public since Triton 3.9."""
    method = buffer.reinterpret if hasattr(buffer, "reinterpret") else buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
