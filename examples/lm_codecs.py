"""What the example sends its gradients through: a codec in the policy, or a compressor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import optax
from jax.sharding import Mesh

import xcoll
from xcoll import codecs, gradients
from xcoll.errors import unknown

COMPRESSORS: dict[str, tuple[str, Callable[[str], gradients.Compressor]]] = {
    "error_feedback": (
        "int8",
        lambda codec: gradients.error_feedback(codecs.named(codec)),
    ),
    "top_k": ("0.01", lambda fraction: gradients.top_k(float(fraction))),
    "random_k": ("0.01", lambda fraction: gradients.random_k(float(fraction))),
    "powersgd": ("4", lambda rank: gradients.powersgd(int(rank))),
    "sign": ("256", lambda block: gradients.sign(block=int(block))),
}
"""Compressors by name: the argument that each has by default, and how it is made from one."""


@dataclass(frozen=True)
class Compression:
    """What gradients are sent through, and over which axis.

    Attributes:
      name: as it was asked for, for example ``int8@host``.
      option: the option that asked.
      axis: mesh axis that is compressed over; None for all.
      codec: the codec, of a policy or of error feedback; None where a compressor has none.
      compressor: None where the codec is the policy's.
    """

    name: str
    option: str
    axis: str | None
    codec: xcoll.codecs.Codec | None = None
    compressor: gradients.Compressor | None = None

    def slow_axis(self, mesh: Mesh) -> str:
        """Returns the axis whose bytes are compared: the compressed one, or the first."""
        return self.axis or mesh.axis_names[0]

    def check(self, mesh: Mesh, fsdp: bool) -> None:
        """Checks it against what is trained.

        Raises:
          ValueError: the mesh has no such axis, or a compressor is to be used on shards.
        """
        if self.axis is not None and self.axis not in mesh.axis_names:
            call = f"{self.option} {self.name}"
            raise ValueError(unknown(call, "mesh axis", self.axis, mesh.axis_names))
        if self.compressor is not None and fsdp:
            raise ValueError(
                f"{self.option} {self.name}: compressors average whole gradients, and with --fsdp"
                " each device has the sum of its shard only; use --codec, or leave --fsdp out"
            )

    def apply(
        self, optimizer: optax.GradientTransformation, policy: xcoll.Policy, mesh: Mesh
    ) -> tuple[optax.GradientTransformation, xcoll.Policy]:
        """Returns the optimizer, with the compressor before it, or the policy with the codec."""
        if self.compressor is None:
            codec = self.codec if self.axis is None else {self.axis: self.codec}
            return optimizer, replace(policy, codec=codec)
        averages = gradients.sync(
            mesh.axis_names, compressor=self.compressor, compress_axis=self.axis, mesh=mesh
        )
        return optax.chain(averages, optimizer), policy

    @property
    def wire_dtype(self) -> str | None:
        """Dtype, as HLO writes it, of what has to be on the wire; None where that is float32."""
        if self.codec is not None:
            return {"int8": "s8", "uint16": "u16"}[self.codec.wire_dtype]
        assert self.compressor is not None
        # Indices and the bits of values; eight signs to a byte.
        return {"TopK": "s32", "TwoShot": "u8"}.get(type(self.compressor).__name__)


def parse_codec(text: str) -> tuple[str, codecs.Codec, str | None]:
    """Reads ``NAME[@AXIS]``; returns the text, the codec and the axis.

    Raises:
      ValueError: there is no such codec.
    """
    name, axis = _split(text)
    if name.partition(":")[0] in COMPRESSORS:
        raise ValueError(
            f"{name!r} is a compressor, not a codec; write --compressor {text}. Codecs:"
            f" {', '.join(codecs.CODECS)}"
        )
    if name not in codecs.CODECS:
        raise ValueError(unknown(repr(text), "codec", name, codecs.CODECS))
    return text, codecs.named(name), axis


def parse_compressor(text: str) -> Compression:
    """Reads ``NAME[:ARGUMENT][@AXIS]``.

    Raises:
      ValueError: there is no such compressor, or it takes no such argument.
    """
    made, axis = _split(text)
    name, colon, argument = made.partition(":")
    if name in codecs.CODECS:
        raise ValueError(
            f"{name!r} is a codec, not a compressor; write --codec {text}, with --error-feedback"
            f" if wanted. Compressors: {', '.join(COMPRESSORS)}"
        )
    if name not in COMPRESSORS:
        raise ValueError(unknown(repr(text), "compressor", name, COMPRESSORS))
    default, make = COMPRESSORS[name]
    try:
        compressor = make(argument if colon else default)
    except ValueError as err:
        raise ValueError(f"{text!r}: {err}; write for example {name}:{default}") from None
    codec = codecs.named(argument or default) if name == "error_feedback" else None
    return Compression(text, "--compressor", axis, codec, compressor)


def compression(
    codec: tuple[str, codecs.Codec, str | None] | None,
    compressor: Compression | None,
    error_feedback: bool,
) -> Compression | None:
    """Puts the three options together.

    Raises:
      ValueError: they do not go together.
    """
    if codec is None:
        if error_feedback and compressor is not None:
            raise ValueError(
                f"--error-feedback with --compressor {compressor.name}: compressors keep what they"
                " did not send by themselves; leave --error-feedback out"
            )
        if error_feedback:
            raise ValueError("--error-feedback: of which codec? Add --codec NAME[@AXIS]")
        return compressor
    text, made, axis = codec
    if compressor is not None:
        raise ValueError(
            f"--codec {text} with --compressor {compressor.name}: gradients go through one of"
            " them; for a codec with feedback write --codec NAME --error-feedback"
        )
    if not error_feedback:
        return Compression(text, "--codec", axis, made)
    name = f"{text}+feedback"
    return Compression(name, "--codec", axis, made, gradients.error_feedback(made))


def _split(text: str) -> tuple[str, str | None]:
    name, at, axis = text.partition("@")
    if at and not axis:
        raise ValueError(f"{text!r}: names no axis after '@'; leave '@' out for all axes")
    return name, axis or None
