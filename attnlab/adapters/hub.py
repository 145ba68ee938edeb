"""The model hub, where it can be reached: without a network, each file would be asked for during half a minute."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

__all__ = ["hub_or_its_cache"]


@contextmanager
def hub_or_its_cache() -> Iterator[bool]:
    """Inside, files of a hub name come from its cache alone where the hub cannot be reached; whether it can."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    reached = not before and _is_known(constants.ENDPOINT)
    try:
        constants.HF_HUB_OFFLINE = not reached
        yield reached
    finally:
        constants.HF_HUB_OFFLINE = before


def _is_known(address: str) -> bool:
    """Whether the host of an address can be looked up, or a proxy does that."""
    if urllib.request.getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(urlsplit(address).hostname, None))
    except OSError:
        return False
