"""Frozen dataclasses out of plain configuration."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def from_plain(cls: Any, values: Mapping[str, Any]) -> Any:
    """``cls(**values)``, nested dataclasses too; lists become tuples.

    Raises:
        ValueError: for a name that the dataclass has not, or one that is missing without a default.
    """
    hints = get_type_hints(cls)
    unknown = sorted(set(values) - {field.name for field in fields(cls)})
    if unknown:
        raise ValueError(f"{cls.__name__} has no {', '.join(unknown)}; it has {', '.join(hints)}")
    made = {}
    for name, value in values.items():
        if is_dataclass(hints[name]):
            made[name] = from_plain(hints[name], value)
        else:
            made[name] = tuple(value) if isinstance(value, list) else value
    try:
        return cls(**made)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error
