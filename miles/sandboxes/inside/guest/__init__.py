"""What runs inside a sandbox: starts commands, moves files and carries connections over its standard input and output.

It is sent as text and needs Python 3.6 and nothing else, so its files import nothing of ours but each other.
"""

from pathlib import Path

__all__ = ["GUEST"]


def _source() -> str:
    """The files as one: the names that they import of each other are there already."""
    text = "".join((Path(__file__).parent / f"{name}.py").read_text() for name in ("base", "streams", "main"))
    head, *parts = text.split("from miles.sandboxes.inside.guest.")
    ends = (")\n" if part.split("\n", 1)[0].endswith("(") else "\n" for part in parts)
    return head + "".join(part.split(end, 1)[1] for part, end in zip(parts, ends, strict=True))


GUEST = _source()
"""The program: `python3 -c GUEST`, with the argument `text` where only text can be carried."""
