"""Which line of the user's code an instruction comes from."""

from __future__ import annotations

import re
from functools import cached_property

from xcoll import _compat
from xcoll.hlo.text import Instruction

_SECTION = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d.*\n)*)", re.M)
_STRING = re.compile(r'^(\d+) "(.*)"$', re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.M)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}", re.M)


class Frames:
    """The stack frames of a compiled program, which stand in tables before its computations.

    Args:
      text: the program's text.
    """

    def __init__(self, text: str):
        self._sections = dict(_SECTION.findall(text))

    def source(self, instruction: Instruction) -> str | None:
        """Returns ``file:line`` of the innermost frame in the user's code, or None.

        Frames of jax, flax, optax and xcoll are passed over.
        """
        number = instruction.attribute("stack_frame_id") or self._in_metadata(
            instruction, r"stack_frame_id=(\d+)"
        )
        if number is None:
            file = self._in_metadata(instruction, r'source_file="([^"]*)"')
            line = self._in_metadata(instruction, r"source_line=(\d+)")
            return f"{file}:{line}" if file and line and _compat.is_users(file) else None
        frame, seen = int(number), set[int]()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            location, frame = self._frames[frame]
            file, line = self._locations.get(location, ("", ""))
            if file and _compat.is_users(file):
                return f"{file}:{line}"
        return None

    @staticmethod
    def _in_metadata(instruction: Instruction, pattern: str) -> str | None:
        found = re.search(pattern, instruction.attribute("metadata") or "")
        return found[1] if found else None

    @cached_property
    def _locations(self) -> dict[int, tuple[str, str]]:
        names = dict(_STRING.findall(self._sections.get("FileNames", "")))
        found = _LOCATION.findall(self._sections.get("FileLocations", ""))
        return {int(number): (names.get(file, ""), line) for number, file, line in found}

    @cached_property
    def _frames(self) -> dict[int, tuple[int, int]]:
        """Location and parent of each frame; XLA prints a parent's number plus one, 1 is none."""
        found = _FRAME.findall(self._sections.get("StackFrames", ""))
        return {int(n): (int(location), int(parent or 1) - 1) for n, location, parent in found}
