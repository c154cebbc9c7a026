"""The building blocks of every section: value types that accept what configs really contain, and `key`, which declares one key."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr

HONOURED = "honoured"
Alters = Literal["result", "placement"]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}


def no_effect(reason: str) -> str:
    """Return the verdict of a key that tunes a mechanism which works otherwise here."""
    return f"no effect here because {reason}"


def later(feature: str) -> str:
    """Return the verdict of a key whose feature is not built yet: it is checked, and does nothing."""
    return f"no effect yet: {feature}"


def key(default: Any, description: str, *, effect: str | None = None, alters: Alters | None = None, **rules: Any) -> Any:
    """Declare one key: default, help text, verdict (None: the one of the section around it) and pydantic's rules.

    `alters` marks a key that is not honoured yet although it would change the result, or where state is placed, so that
    a run can refuse or announce it.
    """
    extra: dict[str, Any] = {}
    if effect is not None:
        extra["effect"] = effect
    if alters is not None:
        extra["alters"] = alters
    return Field(default, description=description, json_schema_extra=extra or None, **rules)


def section(description: str, *, effect: str | None = None, alters: Alters | None = None, **rules: Any) -> Any:
    """Declare a nested section that is present with its defaults when the config leaves it out."""
    return key({}, description, effect=effect, alters=alters, validate_default=True, **rules)


class Section(BaseModel):
    """A group of keys. Unknown keys are refused, and nothing rewrites a value after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, as of a dict: scripts written for DeepSpeed find a dict under `engine.config`."""
        return getattr(self, name) if name in type(self).model_fields else default

    def __getitem__(self, name: str) -> Any:
        if name not in type(self).model_fields:
            raise KeyError(name)
        return getattr(self, name)


def as_int(value: Any) -> int:
    """Return an integer from an int, an integral float (5e8) or a numeric string.

    Raises:
        ValueError: anything else, a boolean and a fraction included.
    """
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # not through a float, which has no exact 2**63 - 1
    number = as_float(value, "an integer")
    if not number.is_integer():
        raise ValueError("expected an integer")
    return int(number)


def as_float(value: Any, wanted: str = "a number") -> float:
    """Return a finite float from a number or a numeric string.

    Raises:
        ValueError: anything else, a boolean included.
    """
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"expected {wanted}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"expected {wanted} that is finite")
    return number


def as_dtype(value: Any) -> str:
    """Return "fp32", "fp16" or "bf16" from any of the usual spellings ("float32", "half", "torch.bfloat16", a torch dtype).

    Raises:
        ValueError: not one of them.
    """
    name = str(value).removeprefix("torch.").lower()
    if name not in _DTYPES:
        raise ValueError("expected one of fp32, fp16, bf16 (or float32, float16, half, bfloat16)")
    return _DTYPES[name]


def _optional_floats(value: Any) -> Any:
    if value is None:
        return None
    return [as_float(item) for item in value] if isinstance(value, (list, tuple)) else as_float(value)


def _int_or_auto(value: Any) -> Any:
    return "auto" if value == "auto" else as_int(value)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _name(value: Any) -> Any:
    if not isinstance(value, (str, list, tuple)):
        raise ValueError('expected "auto" or a list of strings')
    return value


Int = Annotated[int, BeforeValidator(as_int)]
Float = Annotated[float, BeforeValidator(as_float)]
Bool = StrictBool
Str = StrictStr
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(as_dtype)]
OptionalFloats = Annotated[Any, BeforeValidator(_optional_floats)]
IntOrAuto = Annotated[Any, BeforeValidator(_int_or_auto)]
NamesOrAuto = Annotated[Any, BeforeValidator(_name)]
Lower = BeforeValidator(_lower)
