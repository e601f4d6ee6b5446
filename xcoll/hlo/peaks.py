"""Peak rates of devices: how long products and memory take at best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xcoll.hardware import Device, kinds, load
from xcoll.hlo.products import Product

_FIGURES = {
    "f64": ("f64_flops", "f32_flops", "bf16_flops"),
    "f32": ("tf32_flops", "bf16_flops", "f32_flops"),
    "bf16": ("bf16_flops", "f32_flops"),
    "f8": ("fp8_flops", "bf16_flops", "f32_flops"),
    "s8": ("int8_flops", "bf16_flops", "f32_flops"),
}
"""Figures of a hardware table for products of a dtype; the first that the table has."""

_PASSES = {"default": 1, "high": 3, "highest": 6}
"""bfloat16 products that a TPU makes of one in float32."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak rates of one device.

    Attributes:
      memory_bytes_per_s: that memory reads and writes, together.
      flops_per_s: dense products, by figure of the hardware tables (``"bf16_flops"``).
    """

    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]

    @classmethod
    def of(cls, device: Device | None) -> Peaks | None:
        """Returns the rates in the hardware table of a device's kind, or None if there is none.

        The tables state rates of a chip; where it shows as several JAX devices (v3, tpu7x), each
        has its part.

        >>> Peaks.of(Device.named("v5e")).flops_per_s["bf16_flops"]
        197000000000000.0
        """
        if device is None or device.kind not in kinds():
            return None
        table = load(device.kind)
        per_chip = table["devices_per_chip"]["value"][0] if "devices_per_chip" in table else 1
        flops = {
            name: entry["value"] / per_chip
            for name, entry in table["figures"].items()
            if name.endswith("_flops")
        }
        # A pass over data in memory, which reads it and writes it, works at half the bandwidth.
        memory = 2 * device.copy_bytes_per_s / per_chip
        return cls(memory_bytes_per_s=memory, flops_per_s=flops)

    def memory_s(self, num_bytes: int) -> float:
        """Returns how long it takes to read and write so many bytes, in seconds."""
        return num_bytes / self.memory_bytes_per_s

    def product_s(self, product: Product) -> float:
        """Returns how long a product takes, in seconds.

        Products of float32 run as TF32 on GPU and as bfloat16 on TPU, XLA's default there; those of
        precision ``highest`` as float32 on GPU, and as 6 products of bfloat16 on TPU.
        """
        figures, passes = _FIGURES[_class_of(product.dtype)], 1
        if figures is _FIGURES["f32"]:
            if product.precision == "highest":
                figures = ("f32_flops", "bf16_flops")
            if self._first(figures) == "bf16_flops":
                passes = _PASSES[product.precision]
        return product.flops * passes / self.flops_per_s[self._first(figures)]

    def _first(self, figures: tuple[str, ...]) -> str:
        return next(name for name in figures if name in self.flops_per_s)


def _class_of(dtype: str) -> str:
    if dtype.startswith(("f8", "f4")):
        return "f8"
    if dtype in ("s4", "u4", "s8", "u8"):
        return "s8"
    return {"f16": "bf16", "bf16": "bf16", "f64": "f64"}.get(dtype, "f32")
