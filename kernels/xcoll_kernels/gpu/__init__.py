"""Triton kernels for NVIDIA GPUs, through Pallas.

Triton because it compiles, for H100 and without `ptxas` installed, all that the four operations
need. jax calls this backend deprecated (a `DeprecationWarning` where a kernel is lowered, which
Python does not show by default) and still uses it by default. What Mosaic GPU, which is to follow,
would take:

- `plgpu.kernel` in place of `pl.pallas_call`, with the loop over blocks and the copies into
  shared memory written out (`plgpu.emit_pipeline`, `plgpu.copy_gmem_to_smem` and their barriers).
- The largest magnitude of each block is a reduction over rows, which compiles there only in the
  register layout of the matrix units (``Layout.WGMMA``): a tile of 64 rows times a multiple of 8,
  into which float32 and int8 have to be loaded, so a relayout for the packed codes.
- The two halves of a block of four-bit codes could be slices of one shared-memory tile; rounding
  and int8 conversion compile there, and `jax.lax.round` could take the place of the two additions.
- Hopper or later only; the codes' arithmetic (`xcoll_kernels.arithmetic`) would stay as it is.
"""

from xcoll_kernels.gpu.calls import accumulate_and_quantize as accumulate_and_quantize
from xcoll_kernels.gpu.calls import dequantize as dequantize
from xcoll_kernels.gpu.calls import quantize as quantize
from xcoll_kernels.gpu.calls import reduce_and_quantize as reduce_and_quantize
from xcoll_kernels.gpu.calls import why_not as why_not
