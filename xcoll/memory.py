"""What a compiled program keeps in the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a device's memory that a program uses, with the padding of the device's layouts.

    Attributes:
      arguments: of its arguments.
      outputs: of its outputs.
      aliased: of outputs that are written over arguments (donated): they count once.
      temporaries: of everything between, at its peak.
      code: of the program itself; 0 where the compiler does not say (GPU).
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def memory_of(compiled: Any) -> Memory | None:
    """Returns what a compiled program (`jax.stages.Compiled`) uses; None where XLA does not say."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Memory(
        arguments=int(stats.argument_size_in_bytes),
        outputs=int(stats.output_size_in_bytes),
        aliased=int(stats.alias_size_in_bytes),
        temporaries=int(stats.temp_size_in_bytes),
        code=int(stats.generated_code_size_in_bytes),
    )
