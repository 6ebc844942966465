"""What vLLM's Transformers backend changes for everybody, changed back for everybody but vLLM."""

from typing import Any

from torch import nn

_NOT_COPIED = ("__dict__", "__weakref__")


class OwnClasses:
    """The classes of a model's modules as they are now.

    vLLM's Transformers backend patches the decoder class of transformers itself: its bases, its constructor, its call.
    Models of that family that are not vLLM's would no longer run, nor could new ones be made.

    Args:
        model: of the family that vLLM is going to run.
    """

    def __init__(self, model: nn.Module):
        self._before = {cls: (cls.__bases__, dict(vars(cls))) for cls in {type(m) for m in model.modules()}}

    def give_back(self, theirs: nn.Module | None = None) -> None:
        """Undoes what was done to the classes since; vLLM's own modules get subclasses on which it stays.

        Args:
            theirs: vLLM's model, where there is one.
        """
        for cls, (bases, members) in self._before.items():
            if cls.__bases__ != bases:
                patched = _restore(cls, bases, members)
                for module in theirs.modules() if theirs is not None else ():
                    if type(module) is cls:
                        module.__class__ = patched


def _restore(cls: type, bases: tuple[type, ...], members: dict[str, Any]) -> type:
    """Makes a class what it was; returns a subclass with what was changed."""
    added = tuple(base for base in cls.__bases__ if base not in bases)
    changed = {name: value for name, value in vars(cls).items() if members.get(name) is not value}
    cls.__bases__ = bases
    for name in changed:
        if name in members:
            setattr(cls, name, members[name])
        else:
            delattr(cls, name)
    kept = {name: value for name, value in changed.items() if name not in _NOT_COPIED}
    return type(cls.__name__, (cls, *added), kept)
