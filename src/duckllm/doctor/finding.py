"""A finding: what was looked at, what is there, and what to do about it; and values that cannot be known."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, PROBLEM, UNKNOWN = STATUSES = ("ok", "warning", "problem", "unknown")


@dataclass(frozen=True)
class Unknown:
    """A fact that cannot be known here.

    Args:
        reason: Why, in a few words.
    """

    reason: str


@dataclass(frozen=True)
class Finding:
    """What one check says.

    Args:
        where: ``"this machine"``, or a worker's address.
        check: What was looked at.
        status: One of :data:`STATUSES`: it is as it should be, it costs speed or may surprise, nothing runs
            before it is mended, or it cannot be known.
        found: What is there.
        advice: What to do, with the command; empty where nothing is to be done.
    """

    where: str
    check: str
    status: str
    found: str
    advice: str = ""


def unknown(where: str, check: str, fact: Unknown) -> Finding:
    """The finding of a check whose fact cannot be known."""
    return Finding(where, check, UNKNOWN, fact.reason)
