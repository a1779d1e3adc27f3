"""Streams and events that go back to the driver with their last reference."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.driver.interface import Driver

logger = logging.getLogger("simpletuner_gh200")


class Handle:
    """A driver's number for something, destroyed when nobody holds it any more."""

    def __init__(self, value: int, destroy: Callable[[int, int], None], ordinal: int) -> None:
        self.value = value
        weakref.finalize(self, _destroy, destroy, value, ordinal, os.getpid()).atexit = False


def new_stream(driver: Driver, ordinal: int) -> Handle:
    return Handle(driver.create_stream(ordinal), driver.destroy_stream, ordinal)


def new_event(driver: Driver, ordinal: int) -> Handle:
    return Handle(driver.create_event(ordinal), driver.destroy_event, ordinal)


def _destroy(destroy: Callable[[int, int], None], value: int, ordinal: int, pid: int) -> None:
    if os.getpid() != pid:
        return
    try:
        destroy(value, ordinal)
    except MemoryRoomError as failed:
        logger.warning("gh200: %s", str(failed))
