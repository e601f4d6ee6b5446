"""Prices what a device does by itself: encoding and decoding."""

from __future__ import annotations

from xcoll.codecs import Codec
from xcoll.natives import transfer_ps
from xcoll.topology import Device


def coding_ps(device: Device, codec: Codec, encoded_bytes: int, decoded_bytes: int) -> int:
    """Returns the predicted time to encode and to decode, in picoseconds.

    As measured (`xcoll.topology.CodecRate`: of a codec that reads the same, else of one of the same
    kind); else two passes to encode, the largest magnitude first, and one to decode.

    Args:
      device: the device.
      codec: the codec.
      encoded_bytes: bytes of float32 that are encoded.
      decoded_bytes: bytes of float32 that decoding gives.

    Example:
      >>> from xcoll import codecs
      >>> coding_ps(Device.named("cpu"), codecs.int8(), 4194304000, 4194304000) / 10**12
      3.0
    """
    rate = next((r for r in device.codec_rates if r.codec == str(codec)), None)
    if rate is None:
        alike = (r for r in device.codec_rates if r.codec.partition("(")[0] == codec.kind)
        rate = next(alike, None)
    if rate is None:
        return transfer_ps(2 * encoded_bytes + decoded_bytes, device.copy_bytes_per_s)
    return transfer_ps(encoded_bytes, rate.encode_bytes_per_s) + transfer_ps(
        decoded_bytes, rate.decode_bytes_per_s
    )
