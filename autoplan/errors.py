"""Errors of the planning side. Every one is caused by an input of the caller and says what would work.

AutoplanError(ValueError)
  GraphError        a ModelGraph that breaks its own rules
  CaptureError      a model that cannot be captured (names node and source line)
    FormError       a form of an op that its record does not cover
    LengthError     a model whose sizes hold for some lengths of the sequence only
  RuleError         an op without a rule, or a rule that does not fit its operands
  LayoutError       a layout or conversion that cannot exist
  ProfileError      a measured profile that is unknown, broken, or of another machine
  DeviceError       a rank without a device to run on, or devices that do not fit together
  PinError          an illegal pin, degree or cluster (names the rule and the nearest legal value)
  InfeasibleError   nothing satisfies the constraints
  RehearsalError    a program that fails in a rehearsal, or does something else than its plan says
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class AutoplanError(ValueError):
    """Base of every error that autoplan raises about its input.

    Example:
        >>> import autoplan
        >>> try:
        ...     autoplan.Cluster.parse("2x8xh1000")
        ... except autoplan.AutoplanError as error:
        ...     print(type(error).__name__)
        PinError
    """


class GraphError(AutoplanError):
    """A ModelGraph that breaks its own rules."""


class CaptureError(AutoplanError):
    """A model that cannot be captured."""


class FormError(CaptureError):
    """A form of an op that its record does not cover; PyTorch's decomposition of it may be covered."""


class LengthError(CaptureError):
    """A model whose sizes hold for some lengths of the sequence only; a graph of the example's length may exist."""


class RuleError(AutoplanError):
    """An op without a sharding rule, or a rule that does not fit its operands."""


class LayoutError(AutoplanError):
    """A layout or a conversion between layouts that cannot exist."""


class ProfileError(AutoplanError):
    """A measured profile that is unknown, broken, or of another machine."""


class DeviceError(AutoplanError):
    """A rank without a device to run on, or ranks whose devices do not fit together."""


class PinError(AutoplanError):
    """An illegal pin, degree, batch or cluster.

    Attributes:
        names: the choices that the broken rule concerns; the first is the one to change first.
        suggestions: changes of choices by name (None: omit it); each was tried and is legal.
    """

    def __init__(self, message: str, names: Sequence[str] = (), suggestions: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.names: tuple[str, ...] = tuple(names)
        self.suggestions: tuple[Mapping[str, Any], ...] = tuple(suggestions)


class InfeasibleError(AutoplanError):
    """No assignment satisfies the constraints."""


class RehearsalError(AutoplanError):
    """A program fails in a rehearsal, or does something else than its plan says; names the first difference."""
