"""The commands of ``xcoll``, one a module."""
