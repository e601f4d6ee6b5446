"""Pallas kernels of compressed collectives, for TPU and GPU.

Blocks of a payload share a power-of-two scale. `quantize` and `dequantize` encode and decode them;
`reduce_and_quantize` sums encoded contributions and encodes the sum in one pass over memory;
`accumulate_and_quantize` is a hop of a ring. Each runs a kernel of the platform where there is
one that takes the shapes (`why_not` says otherwise), else what XLA compiles, with the same bits in
either case: `xcoll_kernels.reference`, which is the specification, or for CPU
`xcoll_kernels.cpu`, the same as XLA:CPU vectorises it.
"""

from xcoll_kernels.dispatch import MAX_BLOCK as MAX_BLOCK
from xcoll_kernels.dispatch import OPS as OPS
from xcoll_kernels.dispatch import accumulate_and_quantize as accumulate_and_quantize
from xcoll_kernels.dispatch import dequantize as dequantize
from xcoll_kernels.dispatch import quantize as quantize
from xcoll_kernels.dispatch import reduce_and_quantize as reduce_and_quantize
from xcoll_kernels.dispatch import why_not as why_not
