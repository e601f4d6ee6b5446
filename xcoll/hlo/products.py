"""Matrix products and convolutions of a compiled program, and what arithmetic they take."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from xcoll.hlo.text import Instruction, Module, shapes

_COST = re.compile(r'"cost_estimate":\{"flops":"?(\d+)"?')
_CUBLAS_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_WINDOW = re.compile(r"(\w+)=([\d_x\-]+)")


@dataclass(frozen=True, kw_only=True)
class Product:
    """Arithmetic of one instruction.

    Attributes:
      dtype: of the operands, as HLO writes it; the wider where they differ.
      flops: multiplications and additions.
      precision: ``"default"``, ``"high"`` or ``"highest"``.
    """

    dtype: str
    flops: int
    precision: str = "default"


def products(module: Module, computation: str, i: Instruction) -> tuple[Product, ...]:
    """Returns the matrix products and convolutions that an instruction carries out.

    Those are dots, convolutions (the form of every product on TPU; positions that padding or
    dilation leave empty are not counted), calls of cuBLAS, and kernels that state their arithmetic;
    in a fusion, all of its computation. Arithmetic by element is not among them: memory bounds it.

    Args:
      module: the program.
      computation: name of the computation that the instruction stands in.
      i: the instruction.
    """
    if i.opcode in ("fusion", "fusion-start"):
        return tuple(
            product
            for key, callee in i.calls()
            if key == "calls"
            for inner in module.computations[callee].instructions.values()
            for product in products(module, callee, inner)
        )
    instructions = module.computations[computation].instructions
    operands = [shapes(instructions[name].type) for name in i.operands[:2]]
    if stated := _COST.search(i.attributes):
        dtype = operands[0][0][0] if operands else "bf16"
        return (Product(dtype=dtype, flops=int(stated[1])),)
    if len(operands) < 2 or not (operands[0] and operands[1]):
        return ()
    lhs, rhs = operands[0][0], operands[1][0]
    target = i.attribute("custom_call_target") or ""
    flops = 0
    if i.opcode == "dot":
        flops = _dot(i, lhs[1], i.attribute("lhs_contracting_dims") or "")
    elif "cublas" in target and (found := _CUBLAS_CONTRACTING.search(i.attributes)):
        flops = _dot(i, lhs[1], found[1])
    elif i.opcode == "convolution" or "convForward" in target:
        flops = _convolution(i, lhs[1], rhs[1])
    if not flops:
        return ()
    dtype = max((lhs[0], rhs[0]), key=lambda d: int((re.findall(r"\d+", d) or ["8"])[0]))
    asked = (i.attribute("operand_precision") or "") + i.attributes * ("cublas" in target)
    found_precision = re.search(r"\b(highest|high)\b", asked.lower())
    precision = found_precision[1] if found_precision else "default"
    return (Product(dtype=dtype, flops=flops, precision=precision),)


def _dot(i: Instruction, lhs: tuple[int, ...], contracting: str) -> int:
    result = shapes(i.type)[0][1]  # a library call's tuple holds its workspace too
    return 2 * math.prod(result) * math.prod(lhs[int(d)] for d in re.findall(r"\d+", contracting))


def _convolution(i: Instruction, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> int:
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", (i.attribute("dim_labels") or "").strip())
    if labels is None:
        return 0
    out = shapes(i.type)[0][1]
    window = dict(_WINDOW.findall(i.attribute("window") or ""))
    flops = 2 * out[labels[3].index("b")] * out[labels[3].index("f")] * rhs[labels[2].index("i")]
    for label in sorted(set(labels[1]) - {"b", "f"}):
        at = int(label)

        def setting(key: str, default: str, at: int = at) -> str:
            return window[key].split("x")[at] if key in window else default

        flops *= _positions(
            lhs[labels[1].index(label)],
            rhs[labels[2].index(label)],
            out[labels[3].index(label)],
            int(setting("stride", "1")),
            int(setting("pad", "0_0").split("_")[0]),
            int(setting("lhs_dilate", "1")),
            int(setting("rhs_dilate", "1")),
        )
    return flops


@functools.cache
def _positions(
    size: int, kernel: int, out: int, stride: int, pad: int, dilate: int, kernel_dilate: int
) -> int:
    """Counts the pairs of output and kernel position that meet an element, along one dimension."""
    count = 0
    for k in range(kernel) if kernel <= out else range(out):
        # One of the two indices is fixed, the other runs: at start + step * n, n < length.
        if kernel <= out:
            start, step, length = k * kernel_dilate - pad, stride, out
        else:
            start, step, length = k * stride - pad, kernel_dilate, kernel
        last = (size - 1) * dilate
        first = max(0, -(start // step)) if start < 0 else 0
        end = min(length, (last - start) // step + 1) if start <= last else 0
        period = dilate // math.gcd(step, dilate)
        hit = next(
            (n for n in range(first, min(end, first + period)) if (start + step * n) % dilate == 0),
            None,
        )
        count += 0 if hit is None else (end - 1 - hit) // period + 1
    return count
