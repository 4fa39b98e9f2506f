"""Thinking as an opaque text that a client keeps and sends back: a signature, or encrypted content.

Nothing is kept between requests here, so what the model shall read again has to travel with the client. The
text is encoded, not encrypted: it is the client's own conversation.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "duckllm."


def to_opaque(text: str) -> str:
    """The opaque form of ``text``."""
    return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def from_opaque(opaque: str) -> str | None:
    """The text that :func:`to_opaque` was given; None for what it has not made."""
    if not opaque.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(opaque.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
