"""Mosaic kernels for TPU."""

from xcoll_kernels.tpu.calls import accumulate_and_quantize as accumulate_and_quantize
from xcoll_kernels.tpu.calls import dequantize as dequantize
from xcoll_kernels.tpu.calls import quantize as quantize
from xcoll_kernels.tpu.calls import reduce_and_quantize as reduce_and_quantize
from xcoll_kernels.tpu.calls import why_not as why_not
