"""What is typed on the command line: an algorithm with its options, codecs by axis."""

from __future__ import annotations

import ast

from xcoll.policy import Choice


def read_choice(text: str) -> Choice:
    """Reads a choice as `Choice` prints it.

    Raises:
      ValueError: the text is not of that form.

    >>> print(read_choice("hierarchical(native, tree(radix=4))"))
    hierarchical(native, tree(radix=4))
    """
    try:
        return _choice(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise ValueError(
            f"--algorithm {text}: write a name, with options in brackets: ring, tree(radix=4),"
            " hierarchical(native, ring)"
        ) from None


def _choice(node: ast.expr) -> Choice:
    if isinstance(node, ast.Name):
        return Choice(node.id)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise TypeError
    options = []
    for keyword in node.keywords:
        value = ast.literal_eval(keyword.value)
        if keyword.arg is None or type(value) is not int:  # a bool is one, too
            raise TypeError
        options.append((keyword.arg, value))
    return Choice(node.func.id, tuple(sorted(options)), tuple(map(_choice, node.args)))


def read_codec(text: str) -> str | dict[str, str]:
    """Reads a codec's name for all axes, or a list of axis=name.

    >>> read_codec("int8"), read_codec("dcn=int8,ici=bfloat16")
    ('int8', {'dcn': 'int8', 'ici': 'bfloat16'})
    """
    if "=" not in text:
        return text.strip()
    pairs = [part.partition("=") for part in text.split(",")]
    return {axis.strip(): name.strip() for axis, _, name in pairs}
