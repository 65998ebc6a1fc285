"""Errors that all ranks raise alike, so that a job survives them.

A rank that raises on its own leaves the others waiting in their next collective. Input is therefore checked on every
rank before the first collective that depends on it, and the ranks agree on the outcome (`agree`): all of them raise the
same error, or none does, and the job goes on either way.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class AgreedError(Exception):
    """Base of errors that every rank raises alike, after the ranks agreed on them. Collectives still work: `guard` of
    autoplan.runtime.failure lets them pass as they are."""


class AgreedValueError(AgreedError, ValueError):
    """A value given to a public call that does not fit, on this rank or on another."""


def agreed(error: E) -> E:
    """Mark an exception of any class as one that every rank raises alike, so that `guard` lets it pass; returns it."""
    error.__dict__[_MARK] = True
    return error


def is_agreed(error: BaseException) -> bool:
    """Whether every rank raises this exception alike."""
    return isinstance(error, AgreedError) or _MARK in error.__dict__


_MARK = "autoplan_agreed"
