"""Lets transformers load files without printing: what is wrong with them is said once, by our own errors.

Called wherever transformers reads a file of a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Lets transformers print nothing, not even its errors, and puts its verbosity back afterwards."""
    from transformers.utils import logging as untyped

    logging: Any = untyped

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
