"""Mosaic kernels for TPU."""

from xcoll_kernels.tpu.calls import accumulate_and_quantize as accumulate_and_quantize
from xcoll_kernels.tpu.calls import dequantize as dequantize
from xcoll_kernels.tpu.calls import quantize as quantize
from xcoll_kernels.tpu.calls import reduce_and_quantize as reduce_and_quantize
from xcoll_kernels.tpu.calls import why_not as why_not
from xcoll_kernels.tpu.remote_dma import ring_all_gather as ring_all_gather
from xcoll_kernels.tpu.remote_dma import ring_all_reduce as ring_all_reduce
from xcoll_kernels.tpu.remote_dma import ring_reduce_scatter as ring_reduce_scatter
