"""A user's worker or scheduler class with ours mixed in, under a name that every process of vLLM can import.

``path_of_mixed("ours.Worker", "theirs.Worker")`` names an attribute of this module: a class with both as bases,
ours first: its ``super()`` calls reach the user's class, and then vLLM's.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any


def class_at(path: str) -> type | None:
    """Return the class with this dotted path; None if there is none."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None


def path_of_mixed(ours: str, theirs: str) -> str:
    """Return the path of the class with both as bases; it may be passed as ``theirs`` again."""
    return f"{__name__}.{ours.replace('.', '/')}+{_users_part(theirs).replace('.', '/')}"


def users_class(given: Any) -> str | None:
    """Return the path of the user's own class in what vLLM was given; None if there is none.

    Args:
        given: None, ``auto``, a class or its path; also a path of ours.
    """
    if given is None or given == "auto":
        return None
    path = given if isinstance(given, str) else f"{given.__module__}.{given.__qualname__}"
    users = _users_part(path)
    return None if users.startswith("vllm_specplug.") else users


def problem(ours: str, theirs: str, besides: tuple[str, ...] = ()) -> str | None:
    """Return why the classes cannot be mixed, or None.

    Args:
        ours, theirs: paths of classes; the last base of ours is vLLM's class.
        besides: subclasses of vLLM's class that ours does not serve.
    """
    mixin, found = class_at(ours), class_at(theirs)
    if mixin is None:
        return "on the V2 runner ours is mixed into vLLM's own only"
    base = mixin.__bases__[-1]
    if found is None:
        return "it cannot be imported by this name"
    if not issubclass(found, base):
        return f"it is no subclass of {base.__module__}.{base.__qualname__}"
    refused = [path for path in besides if issubclass(found, class_at(path))]
    return f"it is a subclass of {refused[0]}" if refused else None


def _users_part(path: str) -> str:
    return path.rpartition("+")[2].replace("/", ".") if path.startswith(f"{__name__}.") else path


def __getattr__(name: str) -> type:
    ours, plus, theirs = name.replace("/", ".").partition("+")
    if not plus:
        raise AttributeError(name)
    return _mixed(ours, theirs)


@functools.cache
def _mixed(ours: str, theirs: str) -> type:
    bases = class_at(ours), class_at(theirs)
    return type(bases[1].__name__, bases, {"__module__": __name__})
