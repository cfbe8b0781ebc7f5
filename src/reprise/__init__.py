"""Reprise: from a file of labelled texts to a text classifier that can be trusted and rebuilt.

``reprise.Classifier`` is the way to use a trained model from Python; it is loaded on first use, so that importing the package
costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reprise.serving.classifier import Classifier

    __version__: str

__all__ = ["Classifier", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Classifier":
        from reprise.serving.classifier import Classifier

        return Classifier
    if name == "__version__":
        from importlib.metadata import version

        return version("reprise")
    raise AttributeError(f"module 'reprise' has no attribute {name!r}")
