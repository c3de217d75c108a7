"""Names of the classes of the data sets that come with a name of their own."""

__all__ = ["class_names"]

_DIGITS = tuple("0123456789")
_NAMES = {
    "digits": _DIGITS,
    "digits32": _DIGITS,
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "fashion_mnist": (
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    "stl10": ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"),
}


def class_names(name: str) -> tuple[str, ...] | None:
    """Return the names of the classes of a data set in the order of its labels, or None if they are not known.

    >>> class_names("cifar10")[3]
    'cat'
    >>> class_names("folder")
    """
    return _NAMES.get(name)
