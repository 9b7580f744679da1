"""One JSON object, taken apart field by field.  What a field may be is said once, and what nobody took is refused by name.

`null` means "not given" everywhere, as it does at OpenAI.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from mmserve.errors import BadRequest
from mmserve.gateway.json_body import kind_of

_T = TypeVar("_T")


class Fields:
    """`where` is the path of the object in the request, such as `messages[0]`: it leads every `param` of an error."""

    def __init__(self, values: object, where: str = "") -> None:
        if not isinstance(values, dict):
            raise BadRequest(f"{where} must be an object, got {kind_of(values)}", param=where)
        self._values: Mapping[str, object] = values
        self._taken: set[str] = set()
        self._where = where

    def param(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def take(self, name: str) -> object:
        """The raw value, or None when it is null or missing."""
        self._taken.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str) -> int | None:
        return self._typed(name, int, "an integer")

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number", value)
        return float(value) + 0.0  # no -0.0

    def flag(self, name: str) -> bool | None:
        return self._typed(name, bool, "a boolean")

    def text(self, name: str, *, max_length: int | None = None) -> str | None:
        value = self._typed(name, str, "a string")
        if value is not None and max_length is not None and len(value) > max_length:
            raise BadRequest(f"{self.param(name)} must be at most {max_length} characters, got {len(value)}", param=self.param(name))
        return value

    def items(self, name: str) -> list[object] | None:
        return self._typed(name, list, "a list")

    def inner(self, name: str) -> Fields | None:
        value = self.take(name)
        return None if value is None else Fields(value, self.param(name))

    def required(self, name: str, value: _T | None) -> _T:
        """`value`, which was just taken from `name`.  Raises BadRequest if there was none."""
        if value is None:
            raise BadRequest(f"{self.param(name)} is required", param=self.param(name))
        return value

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in choices:
            raise BadRequest(f"{self.param(name)} must be one of {', '.join(choices)}, got {shown(value)}", param=self.param(name))
        return value

    def only(self, name: str, allowed: Collection[object], reason: str) -> None:
        """A field that is known but not offered: it may be missing, null, or say what happens anyway."""
        value = self.take(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
            raise BadRequest(f"{self.param(name)} is not supported: {reason}", param=self.param(name))

    def ignore(self, names: Collection[str]) -> None:
        self._taken.update(names)

    def done(self) -> None:
        """Raises BadRequest for a field that nothing took: it may have meant something."""
        for name in self._values:
            if name not in self._taken:
                raise BadRequest(f"unknown field {shown(self.param(name))}", param=self.param(name)[:120])

    def wrong(self, name: str, wanted: str, value: object) -> BadRequest:
        return BadRequest(f"{self.param(name)} must be {wanted}, got {kind_of(value)}", param=self.param(name))

    def _typed(self, name: str, kind: type[_T], wanted: str) -> _T | None:
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not kind:  # exactly: to Python a boolean is an integer
            raise self.wrong(name, wanted, value)
        return value


def shown(text: str) -> str:
    """A client's own text in a message to it: quoted and short."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
